import pytest
import torch
from torch import nn

from lightning_mist.strategy.logging import LogRecord, combine_records, recorded_logs, replay


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


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean", 0.25 * 4 + 0.75 * 8), ("sum", 12.0), ("min", 4.0), ("max", 8.0), (torch.max, 8.0)],
)
def test_microbatches_combine_by_reduce_fx(reduction, expected):
    parts = [
        (0.25, [record("m", torch.tensor(4.0), reduce_fx=reduction)]),
        (0.75, [record("m", torch.tensor(8.0), reduce_fx=reduction)]),
    ]
    (combined,) = combine_records(parts)
    assert float(combined.value) == pytest.approx(expected)


def test_batch_sizes_add_up_and_order_is_kept():
    parts = [
        (0.5, [record("b", 1.0, batch_size=2), record("a", 3.0)]),
        (0.5, [record("b", 3.0, batch_size=3), record("a", 5.0)]),
    ]
    first, second = combine_records(parts)
    assert (first.name, float(first.value), dict(first.arguments)["batch_size"]) == ("b", 2.0, 5)
    assert (second.name, float(second.value)) == ("a", 4.0)


def test_a_name_logged_in_one_microbatch_only_is_weighted_by_it_alone():
    (combined,) = combine_records([(0.5, []), (0.5, [record("rare", 3.0)])])
    assert combined.value == 3.0


def test_replay_logs_once_through_the_module():
    module = Logged()
    replay(module, [record("loss", torch.tensor(1.5), prog_bar=True)])
    assert module.calls == [("loss", torch.tensor(1.5), {"prog_bar": True})]
