import pytest

from lightning_mist.estimate.replay.rank_replay import Alive
from lightning_mist.estimate.stage_estimates import SHOWN_TENSORS, phase_in_words, tensors_at_peak
from lightning_mist.model.events import Label


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("0B3", "backward of microbatch 3"),
        ("2F0", "forward of microbatch 0"),
        ("1STEP", "optimizer step"),
        ("0REDUCE:2", "gradient reduction"),
        ("start of step", "start of step"),
    ],
)
def test_phases_in_words(action, words):
    assert phase_in_words(action) == words


def alive(nbytes, module, *, part=0, stage=1, microbatch=2, term="activation_bytes", name="activation"):
    label = Label(term, name, part, module, "aten.mm.default", "net.py:3", "float32")
    return Alive(nbytes=nbytes, label=label, stage=stage, microbatch=microbatch)


def test_what_differs_in_its_layer_alone_is_counted_once():
    found, _ = tensors_at_peak(
        [alive(9, "layers.0.mlp"), alive(9, "layers.11.mlp"), alive(9, "layers.0.attn"), alive(5, "layers.0.mlp")], 0
    )
    assert [(item.bytes, item.module, item.count) for item in found] == [
        (9, "layers.0.mlp", 2),
        (9, "layers.0.attn", 1),
        (5, "layers.0.mlp", 1),
    ]
    first = found[0]
    assert (first.stage, first.microbatch, first.operator, first.line, first.dtype) == (
        1,
        2,
        "aten.mm.default",
        "net.py:3",
        "float32",
    )


def test_what_the_runtime_and_parameters_have_is_named():
    own = alive(7, "", part=None, stage=None, microbatch=None, term="batch_bytes", name="its own batch")
    gradient = alive(6, "head", term="gradient_bytes", name="gradient of head.weight")
    found, _ = tensors_at_peak([own, gradient], 4)
    assert [(item.module, item.stage, item.microbatch) for item in found] == [
        ("its own batch", 4, None),
        ("gradient of head.weight", 1, 2),
    ]


def test_only_the_largest_are_kept_but_all_alike_are_counted():
    many = [alive(100 - index, f"x.{'y' * index}") for index in range(SHOWN_TENSORS + 5)]
    found, most = tensors_at_peak([*many, alive(100, "x."), *[alive(60, "y.0")] * 9], 0)
    assert len(found) == SHOWN_TENSORS
    assert found[0].count == 2
    assert [(item.module, item.all_bytes) for item in most[:2]] == [("y.0", 540), ("x.", 200)]
