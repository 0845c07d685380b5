import pytest
import torch
import torch.nn.functional as F

from lightning_mist.errors import TraceError
from tests.tensor_parallel.rules import check, tensor

TABLE, INDICES = tensor(8, 6), torch.tensor([[0, 1, 7, 3], [2, 2, 5, 0]])
LOGITS, TARGET = tensor(10, 8), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -100, 1])


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize(("share", "result"), [(0, None), (1, 2)])
def test_embedding(padding, share, result):
    degrees = (2,) if share == 1 else (2, 4)
    check(lambda t: F.embedding(INDICES, t, padding_idx=padding), (TABLE, share), results=(result,), degrees=degrees)


def test_indices_along_the_sequence():
    check(F.embedding, (INDICES, 1), (TABLE, None), results=(1,))


def test_what_a_split_table_cannot_do():
    with pytest.raises(TraceError, match="max_norm=1"):
        check(lambda t: F.embedding(INDICES, t, max_norm=1.0), (TABLE, 0))
    check(lambda t: F.embedding(INDICES, t, scale_grad_by_freq=True), (TABLE, 0), gathers=("embedding",))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [1, 0])
def test_cross_entropy(share, weighted, smoothing, reduction):
    weight = tensor(8).abs() if weighted else None
    logits, target, degrees = (LOGITS, TARGET, (2, 4)) if share == 1 else (LOGITS[:8], TARGET[-8:], (2, 4))
    check(
        lambda x: F.cross_entropy(x, target, weight, label_smoothing=smoothing, reduction=reduction),
        (logits, share), results=((0 if share == 0 and reduction == "none" else None),), degrees=degrees,
    )  # fmt: skip


def test_cross_entropy_of_more_dimensions_and_options():
    logits, target = tensor(2, 8, 4), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 7]])
    for share in (1, 2):
        check(lambda x: F.cross_entropy(x, target, ignore_index=7), (logits, share), results=(None,))
        check(lambda x: F.cross_entropy(x, target, label_smoothing=0.1), (logits, share), results=(None,))
    check(lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten()), (tensor(2, 4, 8), 1), results=(None,))
    check(lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten()), (tensor(2, 4, 8), 2), results=(None,))


def test_negative_log_likelihood():
    for reduction in ("mean", "sum", "none"):
        check(lambda x, r=reduction: F.nll_loss(F.log_softmax(x, -1), TARGET, reduction=r), (LOGITS, 1))
    weight = tensor(8).abs()
    check(lambda x: F.nll_loss(F.log_softmax(x, -1), TARGET, weight), (LOGITS, 1), results=(None,))
    check(lambda x: F.nll_loss(x, TARGET[-8:], weight), (LOGITS[:8], 0), results=(None,))


def test_losses_of_other_targets_are_gathered():
    probabilities = F.softmax(tensor(10, 8), -1)
    check(lambda x: F.cross_entropy(x, probabilities), (LOGITS, 1), gathers=("cross_entropy",))
    check(lambda x: F.cross_entropy(x, torch.tensor(3)), (tensor(8), 0), gathers=("cross_entropy",))


def test_large_logits_do_not_overflow():
    check(lambda x: F.cross_entropy(x * 1000, TARGET), (LOGITS, 1), tolerance=1e-9)
    check(lambda x: F.softmax(x * 1000, 1), (LOGITS, 1), tolerance=1e-9)
