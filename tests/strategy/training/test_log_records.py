import inspect

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from lightning_mist.strategy.training.log_records import LogRecord, LogRecorder, combine_records, recorded_logs, replay
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
