import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mist.model import examine_optimizer
from lightning_mist.plan import ParameterSplit
from tests import own_optimizers as own

SHAPES = [(128, 160), (64, 32), (130,), (6, 4, 3, 3), ()]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes or SHAPES]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), amsgrad=True, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, nesterov=True),
        torch.optim.Adagrad,
        own.Lion,
        own.Begun,
        lambda p: own.Eight(p, bits=32),
        lambda p: own.EightByGroup([{"params": p, "bits": 32}], bits=8),
        lambda p: own.Factored(p, least=200),
        lambda p: torch.optim.lr_scheduler.StepLR(own.Lion(p), 1).optimizer,
        lambda p: own.Lion([q.data.bfloat16().requires_grad_() for q in p]),
    ],
)
def test_optimizers_that_treat_every_entry_by_itself(make: Callable[[Any], Any]) -> None:
    rule = examine_optimizer(make(parameters()))
    assert (rule.coupled, rule.counted, rule.whole) == (None, None, None)
    assert [group.block for group in rule.groups] == [1]


@pytest.mark.parametrize(
    ("make", "block", "least"),
    [
        (own.Eight, 256, 4096),
        (lambda p: own.Eight(p, block=64, least=0), 64, 0),
        (lambda p: own.Eight(p, block=128, least=16384), 128, 16384),
        (own.EightWrapped, 256, 4096),
        (lambda p: own.EightByGroup([{"params": p, "bits": 8}]), 256, 4096),
        (lambda p: own.Momentum8(p, momentum=0.9), 256, 4096),
    ],
)
def test_blocks_are_found_with_their_length_and_where_they_begin(
    make: Callable[[Any], Any], block: int, least: int
) -> None:
    rule = examine_optimizer(make(parameters(dtype=torch.float64)))
    assert (rule.coupled, rule.counted, rule.whole) == (None, None, None)
    assert [(group.block, group.least) for group in rule.groups] == [(block, least)]


def test_a_group_has_a_rule_of_its_own() -> None:
    large, other, row = parameters((128, 64), (128, 64), (64,))
    rule = examine_optimizer(own.EightByGroup([{"params": [large, row], "bits": 32}, {"params": [other], "bits": 8}]))
    assert [group.block for group in rule.groups] == [1, 256]
    groups = [{"params": [other], "least": 200}, {"params": [large], "least": 64}, {"params": [row], "least": 64}]
    factored = examine_optimizer(own.Factored(groups))
    assert [bool(group.whole) for group in factored.groups] == [False, True, True]
    # Groups of the same options are one kind, whatever they learn by.
    rates = [{"params": parameters((4,)), "lr": 0.1 * 0.9**index} for index in range(9)]
    assert len(examine_optimizer(own.Lion(rates)).groups) == 9


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.Adafactor, r"Adafactor needs whole parameters: in one of .* an entry hangs on \d+ others"),
        (lambda p: torch.optim.Muon(p[:1]), "Muon needs whole parameters"),
        (own.Orthogonal, r"an entry hangs on \d+ others; an optimizer that treats every entry"),
        (own.Factored, r"in one of \(128, 160\) an entry hangs on"),
        (own.RateByShape, "becomes other values by itself"),
        (own.SignOfLarge, r"becomes other values by itself"),
        (own.Lamb, r"Lamb needs whole parameters"),
        (own.Rows, r"and so does state of \(\d+,\)"),
        (own.NormLate, "becomes other values by itself"),
    ],
)
def test_optimizers_that_need_whole_parameters(make: Callable[[Any], Any], reason: str) -> None:
    rule = examine_optimizer(make(parameters()))
    assert rule.coupled is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(rule.whole)


def hooked(p: Any) -> Any:
    optimizer = torch.optim.SGD(p, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def holding(p: Any) -> Any:
    optimizer = own.Lion(p)
    optimizer.masks = {id(p[0]): 1}  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (own.Clipping, "Clipping couples parameters: a step on all gives other values than a step on each"),
        (own.Coupled, "Coupled couples parameters"),
        (lambda p: own.Late(p, place="own"), "Late couples parameters"),
        (lambda p: own.Late(p, place="group", late=1000), "Late couples parameters"),
        (lambda p: own.Late(p, place="state", late=1000), "Late couples parameters"),
        (own.Rounding, "Rounding draws random numbers"),
        (own.RoundingByItself, "RoundingByItself couples parameters"),
        (own.ReadsLoss, "goes otherwise by the same gradients: by the loss"),
        (own.CountsForAll, "goes otherwise by the same gradients"),
        (own.InAttribute, "keeps what it knows of parameters elsewhere than in its state"),
        (own.InGroup, "keeps what it knows of parameters elsewhere than in its state"),
        (own.Evaluated, "writes parameters in eval()"),
        (lambda p: own.Twice(p, lr=0.1), "it calls its closure 2 times"),
        (torch.optim.LBFGS, "LBFGS has all parameters at hand"),
        (hooked, "hooks run around the steps of SGD, and may look at all"),
        (holding, "Lion has all parameters at hand in its attribute masks"),
        (lambda p: own.clips_first(torch.optim.AdamW(p)), "step was put on the AdamW object in place of its class's"),
        (lambda p: own.clips_first(own.Lion(p), "method"), "step was put on the Lion object"),
        (lambda p: own.clips_first(torch.optim.SGD(p, lr=0.1), "class"), "Clipped couples parameters"),
        (lambda p: own.NeedsMore(p, 3), "cannot be stepped on parameters of a trial"),
    ],
)
def test_optimizers_that_no_rank_may_step_alone(make: Callable[[Any], Any], reason: str) -> None:
    rule = examine_optimizer(make(parameters((16, 24), (24,))))
    assert reason in str(rule.coupled)
    assert rule.groups == ()


@pytest.mark.parametrize("cls", [own.Counts, own.CountsIdly])
def test_an_optimizer_that_counts_for_all_parameters_together(cls: Any) -> None:
    rule = examine_optimizer(cls(parameters((16, 24), (24,))))
    assert (rule.coupled, rule.whole) == (None, None)
    assert str(rule.counted).startswith(f"{cls.__name__} counts its steps for all parameters together")


def test_nothing_is_touched() -> None:
    made = parameters((128, 64), (64,))
    optimizer, state, random_state = own.Eight(made, lr=3.0), torch.get_rng_state(), own.random.getstate()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    before = copy.deepcopy(scheduler.state_dict())
    assert examine_optimizer(optimizer).coupled is None
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in made)
    assert (optimizer.param_groups[0]["lr"], optimizer.bits) == (0.0, 8)
    assert scheduler.state_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert own.random.getstate() == random_state
    own.RoundingByItself(made)
    optimizer.step()
    assert len(optimizer.state) == 0  # no gradient


def test_optimizers_of_torch_are_known_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mist.model.split.optimizer_probe.like", None)
    assert examine_optimizer(torch.optim.AdamW(parameters())).whole is None
    with pytest.raises(TypeError):
        examine_optimizer(own.Lion(parameters()))


def test_parameters_without_values_and_other_types() -> None:
    meta = [nn.Parameter(torch.empty(64, 128, device="meta", dtype=torch.bfloat16))]
    assert examine_optimizer(own.Eight(meta), dtype=torch.float32).groups[0].least == 4096


@pytest.mark.parametrize(
    ("shape", "split", "degree", "reason"),
    [
        ((128, 256), ParameterSplit(name="down.weight", dim=1, factors=((256, True),)), 2,
         r"down.weight \(128, 256\) would be cut along 1: blocks of 256 entries would hold others"),
        ((64, 64), ParameterSplit(name="w", dim=0, factors=((64, True),)), 2,
         r"cut along 0: blocks begin at 4096 entries, and its parts have 2048"),
        ((288, 64), ParameterSplit(name="w", dim=0, factors=((3, False), (96, True))), 2,
         "what is kept for each block of 256 entries is not shared out"),
        ((282, 64), ParameterSplit(name="w", dim=0, factors=((3, False), (94, True))), 2, "would hold others"),
        ((32, 64), ParameterSplit(name="w", dim=0, factors=((32, True),)), 2, ""),
    ],
)  # fmt: skip
def test_cuts_of_blocks_are_refused_with_the_numbers(
    shape: tuple[int, ...], split: ParameterSplit, degree: int, reason: str
) -> None:
    (rule,) = examine_optimizer(own.Eight(parameters((128, 64)))).groups
    refusal = rule.refusal(shape, split, degree)
    if not reason:
        assert refusal is None
        return
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal)
