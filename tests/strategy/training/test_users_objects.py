"""Objects of the user's that answer nothing pass through what is logged, returned, loaded and saved."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_mist.leaves import plain_leaves, put_together, take_apart
from lightning_mist.strategy.training.log_records import LogRecorder, MetricRecorder, as_place, named_metrics
from lightning_mist.strategy.training.microbatch_step import merged
from lightning_mist.tensors import batch_rows, leaves, slice_rows


class Closed:
    """Fails whatever it is asked."""

    def __getattr__(self, name):
        raise KeyError(name)

    @property
    def __class__(self):
        raise RuntimeError("not bound")

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = object.__hash__


def holding(value):
    module = nn.Module()
    module.several, module.mean = [value, {"of": value}], MeanMetric()
    vars(module)["value"] = value
    return module


def recorded(value):
    recorder = LogRecorder()
    recorder.metrics = MetricRecorder({}, lambda call: None)
    recorder.log("value", value)
    return recorder.records[0].value


USES = {
    "metrics": lambda value: list(named_metrics(holding(value))) == ["mean"],
    "logged": lambda value: recorded(value) is value,
    "returned": lambda value: merged((), [(0.5, value), (0.5, value)], {}) is value,
    "by ways": lambda value: merged(("out",), [(0.5, {"a": value}), (0.5, {"a": value})], {"b": None})["a"] is value,
    "in places": lambda value: as_place({"a": [value]})["a"][0] is value,
    "state": lambda value: [path for path, _ in plain_leaves({"a": value, "b": torch.ones(1)})] == [("b",)],
    "saved": lambda value: put_together(take_apart({"a": value}))["a"] is value,
    "batch": lambda value: list(leaves({"a": value, "b": [value]}))[1] is value,
    "rows": lambda value: batch_rows({"x": torch.ones(3), "a": value}) is None or slice_rows(torch.ones(3), 0, 1),
}


@pytest.mark.parametrize("use", USES)
def test_nobody_asks_an_object_what_it_need_not_answer(use):
    assert USES[use](Closed()) is not False
