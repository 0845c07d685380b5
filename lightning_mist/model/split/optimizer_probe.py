"""What an optimizer looks at together when it updates an entry, found by stepping others like it.

Stages and ZeRO give each rank whole parameters, so there an optimizer only must not look at several parameters at once.
Tensor parallelism gives it parts of parameters: it must not look at several entries of one parameter either, as those
do that keep row and column statistics (Adafactor), scale by the norm of a parameter (LAMB, LARS), turn its singular
values into ones (Muon), or share a scale among consecutive entries (state of 8 bits).

The others are made from the user's object (:func:`~lightning_mist.optimizers.like`), for parameters of the shapes and
types of its own: many rules begin at a size. They come to the same bits where they do the same, and what is looked at
together is found by cause: the entries that become others where one entry of the gradients does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.errors import TraceError
from lightning_mist.model.user_code import Generators
from lightning_mist.optimizers import (
    fewer,
    is_entrywise,
    is_torchs,
    like,
    looks_around,
    options_of,
    tensors_within,
    within,
)
from lightning_mist.plan import ParameterSplit
from lightning_mist.plan.calls import user_line

_FEW, _MOST = 2**14, 2**18
"""Entries of parameters in trials: where many steps are taken, and where a rule is looked for that begins at a size."""

_IN_BLOCKS = 2**16  # entries of a parameter in which blocks are looked for
_STEPS = 16  # of a trial: the first two make state and use it; something may begin later
_LATE = 100_000  # how many steps all counters say that there were before the last half of them
_RATES = (1e-2, 5e-3, 1e-2, 2e-3)  # of learning, by step: a warm-up begins where every optimizer does the same
_SCALES = (1.0, 1e3, 1e-3, 30.0)  # of gradients, by step: what clips does nothing to small ones
_GAP = 5  # the step in which every other parameter has no gradient
_CAUSE = -1e4  # by how much one entry of the gradients grows; some rules read signs only

_COUPLES = "couples parameters: a step on all gives other values than a step on each, so no rank may update some alone"

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference relative to the largest entry, where bits differ: vectorised loops may round the ends of a tensor
differently, and so may the kernels of a device. Below single precision 1e-2 is more than one unit in the last place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """What an optimizer looks at together when it updates a parameter of one of its groups.

    Attributes:
        block: So many consecutive entries; 1 for each by itself.
        least: The number of entries of a parameter from which on it has blocks.
        whole: Why a parameter is updated as a whole only; empty if parts can be.
    """

    block: int = 1
    least: int = 0
    whole: str = ""

    def refusal(self, shape: Sequence[int], split: ParameterSplit, degree: int) -> str | None:
        """Why a parameter of this shape cannot be updated in such parts; None if it can."""
        entries, where = math.prod(shape), f"{split.name} {tuple(shape)} would be cut along {split.dim}"
        if self.whole:
            return f"{where}: {self.whole}"
        if self.block == 1 or entries < self.least:
            return None
        if entries // degree < self.least:
            return f"{where}: blocks begin at {self.least} entries, and its parts have {entries // degree}"
        stride = math.prod(shape[split.dim + 1 :])
        places = (shape[split.dim], *chain(*split.ranges(0, degree)))
        if any(place * stride % self.block for place in places):
            return f"{where}: blocks of {self.block} entries would hold others"
        return f"{where}: what is kept for each block of {self.block} entries is not shared out"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """What an optimizer looks at together.

    Attributes:
        groups: For each of its groups, when it updates one parameter; empty if it was not looked at.
        coupled: Why no rank may update only some of its parameters; None if ranks may.
        counted: Why a step cannot be taken in several calls, a part of the parameters in each; None if it can.
    """

    name: str
    groups: tuple[GroupRule, ...] = ()
    coupled: str | None = None
    counted: str | None = None

    @property
    def whole(self) -> str | None:
        """Why some parameters are updated as a whole only, in words for the user; None if parts of all can be."""
        reason = next((group.whole for group in self.groups if group.whole), None)
        return reason and (
            f"{self.name} needs whole parameters: {reason}; an optimizer that treats every entry by itself, such as "
            "AdamW or SGD, can update parts"
        )


def examine_optimizer(optimizer: Optimizer, *, dtype: torch.dtype | None = None) -> OptimizerRule:
    """What an optimizer looks at together; it is neither stepped nor changed, nor are random generators.

    Args:
        dtype: Type of the parameters that it will step on, if that is another one than they have now.
    """
    name, is_known, generators = type(optimizer).__name__, is_torchs(optimizer), Generators()
    if is_known and is_entrywise(type(optimizer)):
        return OptimizerRule(name=name, groups=(GroupRule(),) * len(optimizer.param_groups))
    if (reason := looks_around(optimizer)) is not None:
        return OptimizerRule(name=name, coupled=reason)
    trials, talk = _Trials(optimizer, dtype), _Talk()
    try:
        with talk:
            coupled = trials.coupled()
        if talk.said:
            reason = f"{name} shares its step with other processes: it calls {talk.said}"
            return OptimizerRule(name=name, coupled=reason)
        # None of torch's own that comes so far couples parameters; that for sparse gradients cannot be tried.
        if coupled is not None and not is_known:
            return OptimizerRule(name=name, coupled=coupled)
        counted, rules = coupled or trials.counted(), {kind: trials.rule(kind) for kind in {*trials.kinds}}
        return OptimizerRule(name=name, groups=tuple(rules[kind] for kind in trials.kinds), counted=counted)
    finally:
        generators.restore()


class _Talk(TorchDispatchMode):
    """Inside, nothing is said to other processes, which would not answer; keeps what was to be said first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.said = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.said = self.said or f"{func._schema.name} at {user_line()}"
            raise TraceError(self.said)
        return func(*args, **(kwargs or {}))


_Item = tuple[int, list[Any]]
"""A parameter of a trial: the kind of its group; its values, and for every step its gradient, or None."""


class _Trials:
    """Steps of optimizers like one, on parameters like its own. What one becomes is its value and its state.

    Attributes:
        kinds: For each group the first that follows the same rule.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype | None) -> None:
        self._optimizer, self._dtype = optimizer, dtype
        self._make: Any = partial(like, optimizer)
        words = [_kind(options_of(group)) for group in optimizer.param_groups]
        self.kinds = [words.index(word) for word in words]

    def _forms(self, kind: int, most: int) -> list[_Item]:
        """The least and the largest of each number of dimensions in groups of a kind, with at most so many entries."""
        groups = (group for group, of in zip(self._optimizer.param_groups, self.kinds, strict=True) if of == kind)
        own = sorted((p for group in groups for p in group["params"] if p.numel()), key=Tensor.numel)
        ends = {(p.ndim, p.dtype, p.device, end): p for end, of in enumerate((own, own[::-1])) for p in of}
        found = {}
        for p in ends.values():
            dtype = self._dtype if self._dtype is not None and p.is_floating_point() else p.dtype
            form = torch.empty(fewer(p.shape, most), dtype=dtype, device="cpu" if p.is_meta else p.device)
            found[form.shape, dtype, form.device] = form
        return [(kind, [form]) for form in sorted(found.values(), key=Tensor.numel)]

    def coupled(self) -> str | None:
        """Why no rank may update only some of the parameters; None if ranks may."""
        name, generators = type(self._optimizer).__name__, Generators()
        try:
            ended, made = self._ended = self._together()
            is_random = Generators() != generators
            again, _ = self._run(self._items, loss=2.0)
        except Exception as error:
            return (
                f"{name} cannot be stepped on parameters of a trial ({_words(error)}), so that it was not shown to "
                "treat each parameter by itself"
            )
        reasons = (
            (is_random, "draws random numbers: ranks that update other parameters than under DDP draw others"),
            (self._keeps(made, ended), "keeps what it knows of parameters elsewhere than in its state"),
            (not _same(ended, again), "goes otherwise by the same gradients: by the loss, or by what is no state"),
            (is_random or self._couples(ended), _COUPLES),
            (_writes(made, ended), "writes parameters in eval(): a rank those it updates alone"),
        )
        return next((f"{name} {words}" for is_so, words in reasons if is_so), None)

    def _together(self) -> tuple[list[Any], Optimizer]:
        """What parameters of all kinds become when stepped at once, and by what."""
        forms = [item for kind in {*self.kinds} for item in self._forms(kind, _FEW)]
        forms += [item for item in forms if [kind for kind, _ in forms].count(item[0]) == 1]
        ways, errors = (self._make, type(self._optimizer)), []
        # Some state is made with the optimizer, and not every step knows parameters without a gradient.
        for way, gap in product(ways, (_GAP, None)):
            self._make, self._items = way, [_drawn(item, _STEPS, seed=n) for n, item in enumerate(forms)]
            for _, tensors in self._items[1::2] if gap else ():
                tensors[_GAP] = None
            try:
                return self._run(self._items)
            except Exception as error:
                errors.append(error)
        raise errors[0]

    def _couples(self, ended: list[Any]) -> bool:
        try:
            return not _same(ended, [self._run([item])[0][0] for item in self._items])
        except Exception:  # it counts on others
            return True

    def _keeps(self, made: Optimizer, ended: list[Any]) -> bool:
        """Whether there are tensors in attributes or options that were not there and are in no state."""
        held = {t.untyped_storage()._cdata for t in tensors_within(ended)}
        known, new = ([t for t in tensors_within(_beside(of)) if t.numel() > 1] for of in (self._optimizer, made))
        return any(t.untyped_storage()._cdata not in held and not any(_same(t, k) for k in known) for t in new)

    def counted(self) -> str | None:
        """Why a step cannot be taken in several calls; None if it can."""
        name, (ended, made) = type(self._optimizer).__name__, self._ended
        try:
            visited, after = self._run(self._items, at_once=False)
        except Exception as error:
            return f"{name} cannot be stepped on one parameter after the other: {_words(error)}"
        options = [[_leaves(options_of(group)) for group in each.param_groups] for each in (made, after)]
        if _same(ended, visited) and _same(*options):
            return None
        return (
            f"{name} counts its steps for all parameters together: where they are updated one layer after the other it "
            "would count every layer"
        )

    def rule(self, kind: int) -> GroupRule:
        """What the optimizer looks at together when it updates one parameter in a group of a kind."""
        sizes = ((_FEW, _STEPS), (_MOST, 4))
        forms = [(item, steps) for most, steps in sizes for item in self._forms(kind, most)]
        rule = GroupRule()
        try:
            for (_, (form,)), _ in forms:
                rule = self._with_blocks(rule, kind, form)
            single = [(form, steps) for (_, (form,)), steps in forms if rule.block == 1 or form.numel() < rule.least]
            reasons = (self._not_in_parts(kind, *each) for each in single if not rule.whole)
            return next((GroupRule(whole=reason) for reason in reasons if reason), rule)
        except Exception as error:
            return GroupRule(whole=f"it cannot be stepped on parts of a parameter ({_words(error)})")

    def _with_blocks(self, rule: GroupRule, kind: int, form: Tensor) -> GroupRule:
        """A rule that explains what is seen in another parameter, too."""
        entries, shape = form.numel(), tuple(form.shape)
        for at in () if rule.whole else {0, 2 * entries // 3}:
            seen, other = self._seen_together(kind, form, at)
            # Blocks are runs, shorter than the parameter: what needs a whole one may need its square in memory.
            if rule.block == 1 and 1 < len(seen) == seen[-1] - seen[0] + 1 < entries:
                rule = self._blocks(kind, form)
            block = rule.block if entries >= rule.least and not (entries % rule.block and seen == [at]) else 1
            if seen != [*range(at // block * block, min(entries, (at // block + 1) * block))] or (block == 1 and other):
                return GroupRule(whole=f"in one of {shape} an entry hangs on {len(seen) - 1} others{other}")
        return rule

    def _seen_together(self, kind: int, form: Tensor, at: int) -> tuple[list[int], str]:
        """Entries of a parameter whose value or state changes with the gradient of one, and which other state does."""
        _, (value, *gradients) = _drawn((kind, [form]), 3)
        factor, beside = torch.ones_like(form), ""
        factor.view(-1)[at] = _CAUSE
        changed = [gradient * factor for gradient in gradients]
        (mine,), (others,) = (self._run([(kind, [value, *each])])[0] for each in (gradients, changed))
        differs = torch.zeros(form.numel(), dtype=torch.bool, device=form.device)
        for one, two in zip(mine, others, strict=True):
            if isinstance(one, Tensor) and one.numel() == form.numel():
                differs |= ~_equal(one, two).flatten()
            elif isinstance(one, Tensor) and one.numel() > 1 and not _same(one, two):
                beside = f", and so does state of {tuple(one.shape)}"
        return differs.nonzero().flatten().tolist(), beside

    def _blocks(self, kind: int, form: Tensor) -> GroupRule:
        """Into how long blocks entries fall, of a parameter of so many dimensions, and from how many entries on."""

        def length(entries: int, across: int) -> int:
            tail = [across, *[1] * (form.ndim - 2)] if form.ndim > 1 else []
            return len(self._seen_together(kind, form.new_empty([entries // math.prod(tail), *tail]), 0)[0])

        block = length(_IN_BLOCKS, 256)
        if not 1 < block <= _IN_BLOCKS // 4:
            return GroupRule()  # it explains nothing of what was seen
        low, high, across = 1, _IN_BLOCKS // block, math.gcd(block, 64)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if length(middle * block, across) > 1 else (middle + 1, high)
        return GroupRule(block=block, least=low * block if low > 1 or length(block // 2, 1) == 1 else 0)

    def _not_in_parts(self, kind: int, form: Tensor, steps: int) -> str:
        """Why parts along the first two dimensions do not become what they become in the whole, if so."""
        shape = torch.Size([*(size // 8 * 8 or size // 2 * 2 or 1 for size in form.shape[:2]), *form.shape[2:]])
        cuts = [cut for cut in product(range(min(2, form.ndim)), (2, 8)) if shape[cut[0]] % cut[1] == 0]
        reason = ""
        # To the bit; or, where only that is missed, closely in double precision.
        for dtype in (form.dtype, torch.promote_types(form.dtype, torch.float64)):
            (_, tensors), reason = _drawn((kind, [form.new_empty(shape, dtype=dtype)]), steps), ""
            (whole,), _ = self._run([(kind, tensors)])
            for cut in cuts:
                (part,), _ = self._run([(kind, [_last(tensor, shape, *cut) for tensor in tensors])])
                if not _same([_last(each, shape, *cut) for each in whole], part, is_exact=dtype == form.dtype):
                    reason = f"1/{cut[1]} along {cut[0]} of one of {(*shape,)} becomes other values by itself"
            if not reason:
                break
        return reason

    def _run(self, items: list[_Item], *, at_once: bool = True, loss: float = 0.5) -> tuple[list[Any], Optimizer]:
        """What parameters become, stepped at once or one after the other, and the optimizer that did it."""
        parameters = [nn.Parameter(tensors[0].clone()) for _, tensors in items]
        of = {kind: [p for p, item in zip(parameters, items, strict=True) if item[0] == kind] for kind in self.kinds}
        made = self._make([{**options_of(self._optimizer.param_groups[kind]), "params": of[kind]} for kind in of])
        counts: list[dict[Any, Any]] = []
        for step, gradients in enumerate(zip(*(tensors[1:] for _, tensors in items), strict=True)):
            for group in made.param_groups:
                if isinstance(group.get("lr"), Tensor):
                    group["lr"].fill_(_RATES[step % len(_RATES)])
                elif isinstance(group.get("lr"), float):
                    group["lr"] = _RATES[step % len(_RATES)]
            with torch.enable_grad():
                _step(made, parameters, gradients, at_once, loss)
            counts.append({key: float(space[key[1]]) for key, space in _counters(made)} if step < 2 else {})
            for key, space in _counters(made) if step == _STEPS // 2 else ():
                if counts[1].get(key) == counts[0].get(key, math.nan) + 1:
                    space[key[1]] = space[key[1]] + _LATE
        return [[p.detach(), *_leaves(made.state.get(p, {}))] for p in parameters], made


def _drawn(item: _Item, steps: int, seed: int = 0) -> _Item:
    """An item with numbers, of other size in other places, so that a rule that averages shows."""
    (kind, (form, *_)), generator = item, torch.Generator().manual_seed(seed)
    uneven = torch.linspace(0.5, 1.5, form.numel(), dtype=torch.float64).view(form.shape)
    largest = 30.0 if form.dtype is torch.float16 else math.inf
    scales = (1.0, *(min(_SCALES[step % len(_SCALES)], largest) for step in range(steps)))
    numbers = (torch.randn(form.shape, generator=generator, dtype=torch.float64) for _ in scales)
    return kind, [(own * uneven * scale).to(form) for own, scale in zip(numbers, scales, strict=True)]


def _step(
    made: Optimizer, parameters: list[nn.Parameter], gradients: Sequence[Tensor | None], at_once: bool, loss: float
) -> None:
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        return torch.tensor(loss)

    closure()
    if at_once:
        made.step(closure)
        if calls > 2:
            raise RuntimeError(
                f"it calls its closure {calls - 1} times, and the step would run as often for one update"
            )
        return
    # As a unit is updated: without the parameters of others, and not where none has a gradient.
    every = [group["params"] for group in made.param_groups]
    for chosen in [*([parameter] for parameter in parameters if parameter.grad is not None), parameters]:
        for group, whole in zip(made.param_groups, every, strict=True):
            group["params"] = [each for each in whole if any(each is one for one in chosen)]
        if chosen is not parameters:
            made.step()


def _writes(made: Optimizer, ended: list[Any]) -> bool:
    """Whether parameters change when an optimizer is told that training ends, or goes on."""
    values = [value for value, *_ in ended]
    before = [value.clone() for value in values]
    for way in ("eval", "train", "eval"):
        getattr(made, way, dict)()
    return not _same(before, values)


def _counters(made: Optimizer) -> Iterator[tuple[tuple[int, Any], Any]]:
    """What may be a counter, with where it is."""
    for place, space in enumerate([vars(made), *made.param_groups, *made.state.values()]):
        for key, value in list(space.items()):
            if type(value) is int or (isinstance(value, Tensor) and value.ndim == 0):
                yield (place, key), space


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kind(options: dict[str, Any]) -> str:
    """Options that choose the same rule are equal: of numbers (decays, say) it counts whether they are zero."""
    plain = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in options.items()}
    numbers = {key: value != 0 for key, value in plain.items() if isinstance(value, float)}
    return repr(sorted({**plain, **numbers, "lr": None, "initial_lr": None}.items()))


def _beside(made: Optimizer) -> list[Any]:
    """What an optimizer has beside parameters and their state."""
    own = [value for name, value in vars(made).items() if name not in ("state", "param_groups")]
    return [*own, *map(options_of, made.param_groups)]


def _leaves(value: Any) -> list[Any]:
    """The plain tensors in a value and the numbers."""
    return [*tensors_within(value), *(item for item in within(value) if isinstance(item, (int, float, complex)))]


def _last(value: Any, shape: Sequence[int], dim: int, degree: int) -> Any:
    """The last of so many equal parts of what has a value for each entry of a parameter; what has not as it is."""
    is_alike = isinstance(value, Tensor) and value.numel() == math.prod(shape)
    return value.reshape(shape).chunk(degree, dim)[-1].contiguous() if is_alike else value


def _equal(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors have the same entries."""
    if one.dtype.itemsize == 1:
        return one.view(torch.uint8) == other.view(torch.uint8)
    return (one == other) | (one.isnan() & other.isnan())


def _same(one: Any, other: Any, *, is_exact: bool = True) -> bool:
    """Whether all tensors and numbers are the same; close, on a device, which may add in any order."""
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(*each, is_exact=is_exact) for each in zip(one, other, strict=True))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other) or (not is_exact and math.isclose(one, other, rel_tol=1e-6))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if (is_exact and one.device.type == "cpu") or not one.is_floating_point():
        return bool(_equal(one, other).all())
    largest = max(1.0, float(one.abs().max()))
    return bool((one - other).abs().max() <= _TOLERANCE.get(one.dtype, 1e-2) * largest)
