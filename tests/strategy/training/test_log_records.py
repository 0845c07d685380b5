import inspect

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import intercepted
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.strategy.training.log_records import (
    LogRecord,
    LogRecorder,
    combine_records,
    named_metrics,
    recorded_logs,
    replay,
)
from lightning_mist.strategy.training.step_guard import StepCall
from lightning_mist.tensor_parallel import SplitContext, run_ranks, split_sequence


class Logged(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def log(self, name, value, **arguments):
        self.calls.append((name, value, arguments))

    def log_dict(self, dictionary, **arguments):
        raise AssertionError("recorded calls are replayed through log")


def record(name, value, **arguments):
    return LogRecord(name=name, value=value, arguments=tuple(arguments.items()))


def test_recorder_keeps_calls_and_restores_the_module():
    module = Logged()
    with recorded_logs(module) as recorder:
        module.log("loss", torch.tensor(2.0, requires_grad=True), True, on_epoch=True)
        module.log_dict({"a": 1.0, "b": 2.0}, sync_dist=True)
        records = recorder.take()
        assert recorder.take() == ()
    assert [item.name for item in records] == ["loss", "a", "b"]
    assert dict(records[0].arguments) == {"prog_bar": True, "on_epoch": True}
    assert not records[0].value.requires_grad
    module.log("x", 1)
    assert module.calls == [("x", 1, {})]


def test_what_tensor_parallel_ranks_share_is_recorded_whole_and_unseen():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    def run(group):
        values = torch.arange(4.0)
        context = SplitContext(group, sequence_parallel=True)
        shared = split_sequence(values.reshape(4, 1), 0, context)
        recorder = LogRecorder()
        with Seen():
            recorder.log("x", shared)
        (found,) = recorder.take()
        return found.value

    for value in run_ranks(2, run):
        assert value.tolist() == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", torch.max])
@pytest.mark.parametrize(("way", "expected"), [("mean", 7.0), ("sum", 12.0), ("max", 8.0), ("min", 4.0)])
def test_microbatches_combine_by_what_is_logged_and_not_by_reduce_fx(reduction, way, expected):
    parts = [
        (0.25, [record("m", torch.tensor(4.0), reduce_fx=reduction)]),
        (0.75, [record("m", torch.tensor(8.0), reduce_fx=reduction)]),
    ]
    (combined,) = combine_records(parts, {("log", "m", 0): way})
    assert float(combined.value) == pytest.approx(expected)
    assert dict(combined.arguments)["reduce_fx"] is reduction


def test_batch_sizes_add_up_and_order_is_kept():
    parts = [
        (0.5, [record("b", 1.0, batch_size=2), record("a", 3.0)]),
        (0.5, [record("b", 3.0, batch_size=3), record("a", 5.0)]),
    ]
    first, second = combine_records(parts, {})
    assert (first.name, float(first.value), dict(first.arguments)["batch_size"]) == ("b", 2.0, 5)
    assert (second.name, float(second.value)) == ("a", 4.0)


def test_a_name_logged_in_one_microbatch_only_is_weighted_by_it_alone():
    (combined,) = combine_records([(0.5, []), (0.5, [record("rare", 3.0)])], {})
    assert combined.value == 3.0


def test_replay_logs_once_through_the_module():
    module = Logged()
    replay(module, [record("loss", torch.tensor(1.5), prog_bar=True)])
    assert module.calls == [("loss", torch.tensor(1.5), {"prog_bar": True})]


def test_arguments_by_position_are_lightnings():
    positional = [p.name for p in inspect.signature(pl.LightningModule.log).parameters.values()][3:]
    recorder = LogRecorder()
    recorder.log("m", 1.0, *range(len(positional)))
    assert recorder.take()[0].arguments == tuple(zip(positional, range(len(positional)), strict=True))


def test_modules_inside_are_recorded_too():
    module = Logged()
    module.inner = Logged()
    with recorded_logs(module) as recorder:
        module.inner.log("deep", 1.0)
        assert [item.name for item in recorder.take()] == ["deep"]
    module.inner.log("x", 1)
    assert module.inner.calls == [("x", 1, {})]


def test_a_collection_gives_its_own_metrics():
    metrics, recorder = MetricCollection([MeanMetric(), MaxMetric()], prefix="train_"), LogRecorder()
    metrics(2.0)
    recorder.log_dict(metrics)
    records = recorder.take()
    assert [item.name for item in records] == ["train_MeanMetric", "train_MaxMetric"]
    assert records[0].value is metrics["MeanMetric"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.acc = MeanMetric(), MulticlassAccuracy(3)
        self.every = MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)], prefix="all_")
        self.kept = [SumMetric(), {"sum": SumMetric()}]
        self.block = nn.Linear(2, 2)
        self.logged = []

    def log(self, name, value, **arguments):
        self.logged.append((name, value))

    def log_dict(self, values, **arguments):
        for name, value in values.items():
            self.log(name, value)


LOGITS = torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.1], [0.3, 0.1, 0.2], [0.0, 0.1, 0.9]])
LABELS = torch.tensor([1, 0, 1, 2])


def run(net, step):
    """What a step without a batch gives, and what it logged."""
    with recorded_logs(net, with_metrics=True) as log:
        call = StepCall(log.around)
        call.begin(lambda _: step())
        return call.run_part(Microbatch(value=None, weight=1.0, owner=0, index=0)), log.of_parts[0]


def step(net, rows):
    logits, labels = LOGITS[rows], LABELS[rows]
    net.log("acc", net.acc(logits, labels))
    net.mean.update(logits.sum(-1), weight=2.0)
    net.log("mean", net.mean)
    net.log_dict(net.every(logits, labels))
    net.every["MulticlassPrecision"].update(logits, labels)
    net.kept[1]["sum"].update(labels)
    return {"loss": logits.mean(), "acc": net.acc(logits, labels)}


def state(net):
    return {
        name: (item._update_count, [getattr(item, state) for state in item._defaults])
        for name, item in named_metrics(net).items()
        if isinstance(item, Metric)
    }


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_calls_are_made_once_for_the_batch_on_another_ranks_metrics(parts):
    plain, other, own = Net(), Net(), Net()
    for _ in range(2):
        output = step(plain, slice(None))
    for _ in range(2):
        found = [run(other, lambda at=at: step(other, slice(4 * at // parts, 4 * (at + 1) // parts)))
                 for at in range(parts)]  # fmt: skip
        rows = {("metric", "mean.update", 0, 0), ("metric", "kept[1]['sum'].update", 0, 0)}
        rows |= {("metric", f"{name}.forward", n, at) for name in ("acc", "every") for n in (0, 1) for at in (0, 1)}
        rows |= {("metric", "every.MulticlassPrecision.update", 0, at) for at in (0, 1)}
        rest = {("metric", "every._compute_groups_create_state_ref", 0, 0), ("metric", "mean.update", 0, "weight")}
        ways = dict.fromkeys(rows, "rows 0 1") | dict.fromkeys(rest, "same")
        records = combine_records([(1 / parts, records) for _, records in found], ways)
        extras = replay(own, records, {"acc": found[0][0]["acc"]})
    assert torch.equal(extras["acc"], output["acc"])
    torch.testing.assert_close(state(own), state(plain))
    assert [name for name, _ in own.logged] == [name for name, _ in plain.logged[-len(own.logged) :]]
    for (name, value), (_, wanted) in zip(own.logged, plain.logged, strict=True):
        assert value is own.mean if name == "mean" else torch.equal(value, wanted)
    assert all(item[0] == 0 for item in state(other).values())


def test_the_module_is_as_before():
    net = Net()
    before = {name: (type(item), dict(vars(item))) for name, item in named_metrics(net).items()}
    run(net, lambda: step(net, slice(None)))
    with pytest.raises(KeyError):
        run(net, lambda: {}["nothing"])
    for name, item in named_metrics(net).items():
        kind, values = before[name]
        assert type(item) is kind
        assert vars(item).keys() == values.keys()
        assert all(vars(item)[key] is value for key, value in values.items())


REFUSED = {
    "computes with": lambda net: net.mean(1.0) + 1,
    "computes with what": lambda net: torch.ones(()) * net.mean(1.0),
    "(item": lambda net: net.mean(1.0).item(),
    "(__bool__": lambda net: bool(net.mean(1.0)),
    "(__eq__": lambda net: net.mean(1.0) == 1,
    "(__format__": lambda net: f"{net.mean(1.0)}",
    "as its loss": lambda net: net.mean(1.0),
    "reads mean_value": lambda net: net.mean.mean_value,
    "reads compute()": lambda net: net.every.compute(),
    "reads _update_count": lambda net: net.mean.update_called,
    "sets weight": lambda net: setattr(net.mean, "weight", torch.ones(())),
    "a copy of a metric": lambda net: net.mean.clone().update(1.0),
    "not an attribute": lambda net: net.log("x", MeanMetric()),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_known_while_the_step_runs_is_refused(text):
    net = Net()
    with pytest.raises(TraceError) as caught:
        run(net, lambda: REFUSED[text](net))
    assert text in str(caught.value)


def test_a_step_that_goes_on_in_spite_of_a_refusal_is_refused():
    net = Net()

    def careless():
        try:
            return {"loss": 1.0 * net.mean(1.0)}
        except Exception:
            return {"loss": torch.ones(())}

    with pytest.raises(TraceError, match="computes with"):
        run(net, careless)


def test_what_is_written_to_afterwards_is_refused():
    net = Net()

    def careless():
        values = torch.ones(2)
        net.mean.update(values)
        values.zero_()

    with pytest.raises(TraceError, match="writes into a tensor after giving it to metric mean"):
        run(net, careless)


def test_a_layer_may_not_update():
    net = Net()
    net.block.forward = lambda x: net.mean.update(x)  # noqa: PLW0108
    with pytest.raises(TraceError, match="mean is updated inside a layer"), intercepted([net.block], lambda at, f: f):
        run(net, lambda: net.block(torch.ones(2)))


def test_a_metric_outside_of_a_run_is_refused():
    net = Net()
    with recorded_logs(net, with_metrics=True), pytest.raises(TraceError, match="where no step runs"):
        net.mean.update(1.0)


def test_parts_that_call_differently_are_refused():
    net = Net()
    found = [run(net, lambda at=at: net.mean.update(1.0) if at else None)[1] for at in range(2)]
    with pytest.raises(TraceError, match=r"mean\.update is called for some parts of a batch and not for others"):
        combine_records([(0.5, records) for records in found], {})


def test_a_metric_that_draws_is_refused():
    net = Net()
    net.mean.update = lambda value: torch.rand(())
    _, records = run(net, lambda: net.mean.update(1.0))
    with pytest.raises(TraceError, match="metric mean draws random numbers"):
        replay(net, records)


def test_parts_of_tensor_parallel_ranks_are_given_whole_and_unseen():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    def of_rank(group):
        shared = split_sequence(torch.arange(4.0).reshape(4, 1), 0, SplitContext(group, sequence_parallel=True))
        net = Net()

        def watched():
            with Seen():
                net.mean.update(shared)

        return run(net, watched)[1][0].value[0]

    for value in run_ranks(2, of_rank):
        assert value.tolist() == [[0.0], [1.0], [2.0], [3.0]]
