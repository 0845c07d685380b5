"""How the blocks of one kind can be shared out: candidates by probing, accepted if they pass the check with numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_mist.model.fakes import convert_plain_tensors, filled, put, slots_of, thin
from lightning_mist.model.operator_costs import LinearCall, LinearMode
from lightning_mist.model.split.factored import LARGE, MOST_BYTES, is_factored
from lightning_mist.model.split.split_check import CPU, BlockCall, BlockCalls, Check, CheckOutcome, arguments, prepare
from lightning_mist.model.user_code import unchanged
from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.plan.tensor_split import Factors, ParameterSplit, SequenceSplit
from lightning_mist.units import format_bytes

# Which linear layers of a block can be shared out, found from what depends on what, without names or a graph.
#
# The block runs once. The output of every linear layer is replaced by random numbers in a fresh leaf, so that nothing
# is multiplied and gradients stop there. The inputs of a layer are cut into one group per rank; random gradients of one
# group, sent back, arrive at exactly the outputs of earlier layers that this rank would need. If no two ranks need the
# same output and all are needed by someone, the earlier layers can be shared out along their outputs (column-parallel)
# and this one along its inputs (row-parallel; Shoeybi et al., 2019), with nothing to communicate in between.

_OUTER = (1, 2, 3, 4, 5, 6, 8)
"""Into how many equal parts a layer's inputs may fall, each of which is shared out: one, unless a layer reads several
results side by side (fused attention and feed-forward, for example)."""

_PRIMES = (2, 3, 5, 7)  # factors of numbers of heads; the next, 11, is larger than any degree that is tried
_MOST_GROUPS = 128  # the most independent groups that are told apart for messages; attention has rarely more heads

_LEAST_SHARE = 0.02
"""The least part of a block's weights for which sharing out is worth a collective of its own: a choice, far below the
third or two thirds that attention and feed-forward have, above what adapters have."""

_UNSEEN = -1

_Dealt = tuple[Factors, tuple[int, ...]]
"""How a dimension is shared out: its factors, and the sizes of pieces side by side where they differ."""


@dataclass(frozen=True, slots=True)
class _Site:
    call: LinearCall
    leaf: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayers:
    """Linear layers that can be shared out together, by the names of their weights inside the block."""

    inner: tuple[str, ...]  # the layers shared out along their inputs
    splits: tuple[ParameterSplit, ...]  # how these, the layers that feed them, and their biases are shared out


class _Sites(LinearMode):
    def __init__(self, parameters: Mapping[int, Tensor], generator: torch.Generator) -> None:
        super().__init__(parameters)
        self._generator = generator
        self.found: list[_Site] = []

    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        leaf = torch.randn(call.output_shape, dtype=call.input.dtype, generator=self._generator).requires_grad_()
        self.found.append(_Site(call, leaf))
        return leaf.clone()


@dataclass(slots=True, kw_only=True)
class Probe:
    """One run of a block, of which to ask how it can be shared out.

    Attributes:
        hidden: The block's input that it transforms, if known; a layer that sees it directly is not shared out along
            its inputs, which every rank has anyway.
    """

    sites: dict[str, list[_Site]]
    names: dict[int, str]
    hidden: Tensor | None
    generator: torch.Generator
    _groups: dict[str, int] = field(default_factory=dict)

    def layers(self, degree: int) -> tuple[SharedLayers, ...]:
        """What can be shared out over ``degree`` ranks, as independent sets of layers."""
        # Large matrices first, so that small ones beside them (adapters) follow their division and not the reverse.
        order = list(self.sites)[::-1]
        order.sort(key=lambda name: -self._size(name))
        chosen: dict[str, ParameterSplit] = {}
        sets: list[tuple[set[str], set[str]]] = []
        for inner in order:
            feeds = None if inner in chosen else self._feeds(inner, degree)
            if feeds is None:
                continue
            outer, factors = feeds
            dims = {name: self.sites[name][0].call.output_dim for name in factors}
            splits = {
                name: ParameterSplit(name=name, dim=dims[name], factors=each, pieces=pieces)
                for name, (each, pieces) in factors.items()
            }
            if any(chosen.get(name, split) != split for name, split in splits.items()):
                continue
            chosen |= splits
            call = self.sites[inner][0].call
            chosen[inner] = ParameterSplit(name=inner, dim=call.input_dim, factors=_product(outer, call.width))
            touching = [item for item in sets if item[1] & splits.keys()]
            sets = [item for item in sets if item not in touching]
            inners = {inner}.union(*(item[0] for item in touching))
            sets.append((inners, {inner, *splits}.union(*(item[1] for item in touching))))
        total = sum(self._size(name) for name in self.sites)
        return tuple(
            SharedLayers(
                inner=tuple(name for name in self.sites if name in inners),
                splits=tuple(
                    split for name in self.sites if name in members for split in self._with_bias(chosen[name], inners)
                ),
            )
            for inners, members in sets
            if sum(map(self._size, members)) >= _LEAST_SHARE * total
        )

    def _size(self, name: str) -> int:
        return self.sites[name][0].call.weight.numel()

    def why_whole(self, degree: int) -> tuple[str, ...]:
        """For layers that could be shared out but not over ``degree`` ranks, why not."""
        notes = []
        for name, sites in self.sites.items():
            groups = self._num_groups(name)
            if groups > 1 and groups % degree and any(name in layers.inner for layers in self.layers(groups)):
                notes.append(
                    f"{name} and what feeds it stay whole: their {sites[0].call.width} values fall into {groups} "
                    f"groups (heads, for example), which {degree} does not divide"
                )
            elif groups == 1 and (mixed := self._of_mixed_sizes(name, degree)):
                notes.append(
                    f"{name} and what feeds it stay whole: a rank would need parts of different sizes side by side in "
                    f"{mixed}, of which some would go to several ranks or in other orders, which a plan cannot say"
                )
        return tuple(notes)

    def _of_mixed_sizes(self, inner: str, degree: int) -> str | None:
        """The first layer of which ranks need different outputs, but not in equal parts that alternate."""
        owners = self._owners(inner, degree, 1) if self.sites[inner][0].call.width % degree == 0 else None
        return next((name for name, owner in (owners or {}).items() if _dealt(owner, degree) is None), None)

    def _num_groups(self, inner: str) -> int:
        """Into how many independent groups a layer's inputs fall; 1 if each depends on all."""
        if inner not in self._groups:
            groups = 1
            while groups < _MOST_GROUPS:
                finer = next((groups * p for p in _PRIMES if self._feeds(inner, groups * p) is not None), None)
                if finer is None:
                    break
                groups = finer
            self._groups[inner] = groups
        return self._groups[inner]

    def _feeds(self, inner: str, degree: int) -> tuple[int, dict[str, _Dealt]] | None:
        """Of how many parts a layer's inputs consist, and how the layers that feed it are shared out with them."""
        width = self.sites[inner][0].call.width
        for outer in _OUTER:
            if width % (outer * degree) == 0:
                owners = self._owners(inner, degree, outer)
                if owners:
                    factors = {name: _dealt(owner, degree) for name, owner in owners.items()}
                    if all(each is not None for each in factors.values()):
                        return outer, {name: each for name, each in factors.items() if each is not None}
        return None

    def _owners(self, inner: str, degree: int, outer: int) -> dict[str, Tensor] | None:
        """Which rank needs which output of which earlier layer; None if two need the same."""
        calls = [site.call for site in self.sites[inner]]
        if not all(call.input.requires_grad for call in calls):
            return None
        others = [(name, site) for name, sites in self.sites.items() if name != inner for site in sites]
        chunk = calls[0].width // (outer * degree)
        rank_of = torch.arange(calls[0].width) // chunk % degree
        owners: dict[str, Tensor] = {}
        for rank in range(degree):
            gradients = self._send_back(calls, rank_of == rank, [site.leaf for _, site in others])
            if gradients is None:
                return None
            for (name, site), gradient in zip(others, gradients, strict=True):
                if gradient is None:
                    continue
                needed = (gradient != 0).reshape(-1, gradient.shape[-1]).any(0)
                if not needed.any():
                    continue
                size = site.call.weight.shape[site.call.output_dim]
                owner = owners.setdefault(name, torch.full((size,), _UNSEEN))
                part = owner[site.call.first_row : site.call.first_row + site.call.rows]
                if ((part != _UNSEEN) & (part != rank) & needed).any():
                    return None
                part[needed] = rank
        return owners

    def _send_back(
        self, calls: list[LinearCall], mask: Tensor, leaves: list[Tensor]
    ) -> tuple[Tensor | None, ...] | None:
        """Gradients of the leaves for random gradients of some inputs; None if the block's own input gets one too."""
        inputs = [call.input for call in calls]
        given = [torch.randn(x.shape, dtype=x.dtype, generator=self.generator) * mask for x in inputs]
        wanted = leaves if self.hidden is None else [*leaves, self.hidden]
        if not wanted:  # one linear layer alone, behind something without parameters
            return ()
        gradients = torch.autograd.grad(inputs, wanted, given, retain_graph=True, allow_unused=True)
        if self.hidden is not None:
            *gradients, direct = gradients  # type: ignore[assignment]
            if direct is not None and direct.any():
                return None
        return tuple(gradients)

    def _with_bias(self, split: ParameterSplit, inner: set[str]) -> tuple[ParameterSplit, ...]:
        """A layer's split, and that of its bias, which only follows outputs."""
        biases = {id(b): b for b in (_root(site.call.bias) for site in self.sites[split.name]) if b is not None}
        if split.name in inner or len(biases) != 1:
            return (split,)
        ((key, bias),) = biases.items()
        if key not in self.names or tuple(bias.shape) != (split.size,):
            return (split,)
        return split, replace(split, name=self.names[key], dim=0)


def probe(run: Callable[[], Any], parameters: Mapping[str, Tensor], hidden: Tensor | None, seed: int = 0) -> Probe:
    """Run a block once on inputs that require gradients, its slots holding ``parameters``; what depends on what."""
    generator = torch.Generator().manual_seed(seed)
    mode = _Sites({id(tensor): tensor for tensor in parameters.values()}, generator)
    with torch.enable_grad(), mode:
        run()
    names = {id(tensor): name for name, tensor in parameters.items()}
    sites: dict[str, list[_Site]] = {}
    for site in mode.found:
        sites.setdefault(names[id(site.call.weight)], []).append(site)
    dims = {name: {site.call.output_dim for site in found} for name, found in sites.items()}
    return Probe(
        sites={name: found for name, found in sites.items() if len(dims[name]) == 1},
        names=names,
        hidden=hidden,
        generator=generator,
    )


def _root(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor._base is None else tensor._base


def _product(outer: int, size: int) -> Factors:
    return ((size, True),) if outer == 1 else ((outer, False), (size // outer, True))


def _dealt(owner: Tensor, degree: int) -> _Dealt | None:
    """A dimension's factors or pieces such that every rank gets what it needs; None if there are none.

    Entries that nobody needs (behind a rectifier that passed nothing, for example) go with their neighbours.
    """
    size = len(owner)
    known = owner != _UNSEEN
    if size % degree or 2 * int(known.sum()) < size:
        return None
    for outer in range(1, size // degree + 1):
        if size % (outer * degree) == 0:
            expected = torch.arange(size) // (size // (outer * degree)) % degree
            if torch.equal(expected[known], owner[known]):
                return _product(outer, size), ()
    pieces = _pieces(owner, degree)
    return None if pieces is None else (((size, True),), pieces)


def _pieces(owner: Tensor, degree: int) -> tuple[int, ...] | None:
    """Sizes of what lies side by side, of each of which every rank in turn needs an equal part; None if that is not so.

    Entries that nobody needs go with those before them.
    """
    known = torch.where(owner != _UNSEEN, torch.arange(len(owner)), -1).cummax(0).values
    ranks, lengths = torch.unique_consecutive(
        owner[known.clamp(min=int((owner != _UNSEEN).int().argmax()))], return_counts=True
    )
    if len(ranks) % degree or not torch.equal(ranks, torch.arange(len(ranks)) % degree):
        return None
    parts = lengths.view(-1, degree)
    return tuple((parts[:, 0] * degree).tolist()) if bool((parts == parts[:, :1]).all()) else None


_COPIES = 4  # a check holds the whole parameters and their gradients, and the parts and theirs
_EXACT_BYTES = 2**29  # what a check may take in 64 bits, in which it is twice as long as in 32

Splits = tuple[ParameterSplit, ...]

_Made = TypeVar("_Made")

NOTHING = "no two linear layers with only elementwise work or attention heads between them were found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a kind of block is shared out over so many ranks; ``entry`` is for the position of the kind's example."""

    splits: Splits = ()  # its parameters that are shared out, by names inside the block
    entry: SequenceSplit | None = None
    leaves: tuple[tuple[int, int], ...] = ()  # results that then come in parts, as ``(leaf, dim)``
    whole_sequence: str | None = None  # why it must be entered with whole sequences, if so
    notes: tuple[str, ...] = ()  # what stays whole and why, and what is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    label: str
    probe: Probe
    check: Check
    free: frozenset[str]  # names of parameters that nothing but its own block uses
    entry: SequenceSplit | str  # how it would be entered in parts along the sequence, or why it cannot be
    length: int  # length of the sequence in the user's batch
    tried: int  # length in the small batch


def split_kind(module_map: ModuleMap, calls: BlockCalls, kind: int, degrees: Sequence[int]) -> dict[int, Found]:
    """How the blocks of a kind can be shared out over each number of ranks; inside of ``isolated``."""
    label = type(calls.examples[kind].block).__name__
    subject = _study(module_map, calls, kind)
    if isinstance(subject, str):
        return {degree: Found(whole_sequence=subject, notes=(f"{label} stays whole: {subject}",)) for degree in degrees}
    return {degree: _split(subject, degree) for degree in degrees}


def rows_of_kind(module_map: ModuleMap, calls: BlockCalls, kind: int, degrees: Sequence[int]) -> dict[int, Found]:
    """Whether blocks of a kind can compute on their tokens of rows that so many ranks share; inside of ``isolated``."""
    subject = _study(module_map, calls, kind)
    if isinstance(subject, str):
        return {degree: Found(whole_sequence=subject) for degree in degrees}
    return {degree: _with_sequence(subject, Found(), degree, adds_later=True) for degree in degrees}


def held_entries(parameters: Iterable[Tensor]) -> int:
    """Of how many of these parameters' entries a check holds each: of all but those of large matrices."""
    return sum(parameter.numel() for parameter in parameters if not is_factored(parameter))


def in_a_type(entries: int, make: Callable[[torch.dtype], _Made], otherwise: str) -> _Made | str:
    """What is made of a part of a module in the most exact floating-point type in which it can be; else why in none.

    Args:
        entries: Of how many entries of its parameters a check holds each, which may be too many for any host.
        otherwise: How the reason begins that it fails in every type.
    """
    needed = _COPIES * 4 * entries
    if needed > MOST_BYTES:
        return (
            f"it could not be checked: its parameters besides matrices of more than {LARGE:,} entries take "
            f"{format_bytes(needed)} in a check, which may take {format_bytes(MOST_BYTES)}"
        )
    failure: Exception | None = None
    # Code that names an element type fails in another one than the user's.
    for dtype in (torch.float64, torch.float32)[2 * needed > _EXACT_BYTES :]:
        try:
            return make(dtype)
        except Exception as error:
            failure = failure or error
    return f"{otherwise}: {type(failure).__name__}: {failure}"


def _study(module_map: ModuleMap, calls: BlockCalls, kind: int) -> _Subject | str:
    call = calls.examples[kind]
    made = in_a_type(
        held_entries(call.block.parameters()),
        lambda dtype: (_probe(call, dtype), prepare(call, dtype)),
        "it cannot be run by itself on the CPU",
    )
    if isinstance(made, str):
        return made
    entry, length, tried = _entry(module_map, calls, kind)
    return _Subject(
        label=type(call.block).__name__,
        probe=made[0],
        check=made[1],
        free=_free(module_map, calls, kind),
        entry=entry,
        length=length,
        tried=tried,
    )


def _probe(call: BlockCall, dtype: torch.dtype) -> Probe:
    generator = torch.Generator().manual_seed(0)
    with unchanged(call.block):
        held: dict[str, Tensor] = {}
        for name, (parameter, slots) in slots_of(call.block).items():
            # Probing needs the values of norms only.
            held[name] = (thin if is_factored(parameter) else filled)(parameter, dtype, generator)
            if held[name].is_floating_point():
                held[name].requires_grad_()
            put(slots, held[name])
        convert_plain_tensors(call.block, dtype, CPU)
        args, kwargs, _ = arguments(call, dtype, generator)
        hidden = None if call.hidden is None else tree_flatten((args, kwargs))[0][call.hidden]
        return probe(lambda: call.block(*args, **kwargs), held, hidden)


def _free(module_map: ModuleMap, calls: BlockCalls, kind: int) -> frozenset[str]:
    """Parameters, by names inside the block, that in every block of the kind belong to that block alone."""
    names: set[str] | None = None
    for position in calls.kinds.members(kind):
        block = module_map.blocks[position]
        own = {
            ".".join(filter(None, (owner.removeprefix(block).removeprefix("."), attribute)))
            for use in module_map.parameters
            if all(owner == block or owner.startswith(f"{block}.") for owner, _, _ in use.slots)
            for owner, attribute, _ in use.slots
        }
        names = own if names is None else names & own
    return frozenset(names or ())


def _entry(module_map: ModuleMap, calls: BlockCalls, kind: int) -> tuple[SequenceSplit | str, int, int]:
    """How a kind of block is entered in parts along the sequence, the real length and the tried one."""
    call, position = calls.examples[kind], calls.kinds.examples[kind]
    if call.hidden is None:
        return "it returns a tensor of another shape than any it takes", 0, 0
    hidden = tree_flatten((call.args, call.kwargs))[0][call.hidden]
    cuts = [module_map.cuts[p - 1] for p in calls.kinds.members(kind) if p > 0]
    alike = [
        live
        for cut in cuts
        for live in cut
        if len(live.shape) == hidden.dim() and live.shape[-1:] == tuple(hidden.shape[-1:]) and live.requires_grad
    ]
    rows = alike[0].batch_dim if alike and alike[0].batch_dim is not None else 0
    dims = [dim for dim in range(hidden.dim() - 1) if dim != rows and hidden.shape[dim] > 1]
    if not dims:
        return f"its hidden states of shape {tuple(hidden.shape)} have no dimension but rows and features", 0, 0
    length = alike[0].shape[dims[0]] if alike else hidden.shape[dims[0]]
    return SequenceSplit(position=position, leaf=call.hidden, dim=dims[0]), length, hidden.shape[dims[0]]


def _split(subject: _Subject, degree: int) -> Found:
    """The most of a kind's layers that can be shared out over ``degree`` ranks."""
    candidates = [
        layers for layers in subject.probe.layers(degree) if all(split.name in subject.free for split in layers.splits)
    ]
    notes = [f"{subject.label}: {note}" for note in subject.probe.why_whole(degree)]
    tied = [layers for layers in subject.probe.layers(degree) if layers not in candidates]
    notes += [
        f"{subject.label}: {', '.join(layers.inner)} stays whole: others use its parameters too" for layers in tied
    ]
    splits, outcome, troubles = _largest(subject, candidates, degree)
    notes += troubles
    if not splits:
        reason = NOTHING if not (candidates or notes) else "none of its layers are shared out"
        return Found(whole_sequence=reason, notes=tuple(notes or [f"{subject.label} stays whole: {NOTHING}"]))
    notes += outcome.slow(f"{subject.label} puts parts together")
    return _with_sequence(subject, Found(splits=splits, notes=tuple(notes)), degree)


def _largest(
    subject: _Subject, candidates: Sequence[SharedLayers], degree: int
) -> tuple[Splits, CheckOutcome, list[str]]:
    """All candidates together if they pass the check, else those that pass alone."""
    nothing: Splits = ()
    troubles: list[str] = []
    outcome = CheckOutcome()
    chosen = list(candidates)
    while chosen:
        splits = tuple(split for layers in chosen for split in layers.splits)
        outcome = subject.check(splits, degree)
        if outcome.reason is None:
            return splits, outcome, troubles
        if len(chosen) == 1 or len(chosen) < len(candidates):
            troubles.append(_differs(subject, chosen, degree, outcome))
            break
        alone = [(layers, subject.check(layers.splits, degree)) for layers in chosen]
        troubles += [_differs(subject, [layers], degree, each) for layers, each in alone if each.reason is not None]
        passing = [layers for layers, each in alone if each.reason is None]
        # Each passes, together they do not: keep the largest.
        chosen = passing if len(passing) < len(chosen) else passing[:1]
    return nothing, outcome, troubles


def _differs(subject: _Subject, layers: Sequence[SharedLayers], degree: int, outcome: CheckOutcome) -> str:
    names = ", ".join(name for each in layers for name in each.inner)
    return (
        f"{subject.label}: {names} and what feeds it stay whole: shared out over {degree} ranks it is not the same: "
        f"{outcome.reason}"
    )


def _with_sequence(subject: _Subject, found: Found, degree: int, *, adds_later: bool = False) -> Found:
    """A found split with the way to enter it in parts along the sequence, or the reason why there is none."""
    entry, outcome = subject.entry, CheckOutcome()
    if isinstance(entry, str):
        return replace(found, whole_sequence=entry)
    if subject.length % degree:
        reason: str | None = f"the sequence has {subject.length} positions, which {degree} does not divide"
    elif subject.tried % degree:
        reason = f"it could be tried with {subject.tried} positions only, which {degree} does not divide"
    else:
        outcome = subject.check(found.splits, degree, entry, adds_later)
        reason = outcome.reason or (None if outcome.sequence_leaves else "its results come whole")
    if reason is not None:
        return replace(found, whole_sequence=reason)
    notes = outcome.slow(f"{subject.label} puts parts of sequences together")
    return replace(found, entry=entry, leaves=outcome.sequence_leaves, notes=(*found.notes, *notes))
