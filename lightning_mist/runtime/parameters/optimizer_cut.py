"""The user's optimizer over a part of the model: which parameters it updates, clipping, and its state in one piece.

The optimizer is the one that the user built over the whole module. It is cut by removing from its groups what this rank
does not update; a checkpoint still has the layout that a single process or data parallelism gives, with parameters
numbered through all groups as the user listed them. Of a parameter that tensor parallelism has shared out the rank
updates its part; state with one value per entry is shared out in the same way, other state is the same on all ranks.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mist.errors import PlanError
from lightning_mist.leaves import Path, Wrapping, on_host, plain_leaves, put_together, take_apart, with_leaves
from lightning_mist.optimizers import like
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.parameter_parts import AnyPart, Speakers
from lightning_mist.tensors import leaves, rebuild

_STATE_TAG = 1 << 22
"""First tag of gathered optimizer state; all other tags are smaller."""

_HEADER_ELEMENTS = 256
"""State of at most so many elements (step counters, for example) travels inside the header instead of by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCut:
    """An optimizer that updates a part of its parameters, and what it was before.

    Attributes:
        groups: For each group of the optimizer, every parameter that the user put there.
        names: For each group, the names that came with the parameters; None if none did.
        owned: What this rank updates.
        parts: Of which parameters this rank has a part.
    """

    optimizer: Optimizer
    groups: tuple[tuple[nn.Parameter, ...], ...]
    names: tuple[tuple[str, ...] | None, ...]
    owned: Collection[nn.Parameter]
    parts: Mapping[nn.Parameter, AnyPart] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[nn.Parameter, int]:
        """The number of each parameter in the layout of the whole model."""
        parameters = [parameter for group in self.groups for parameter in group]
        return {parameter: number for number, parameter in enumerate(parameters)}

    @contextmanager
    def showing(self, keep: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        """Inside, groups have of what the user put there what ``keep`` says; afterwards what they had before."""
        before = [(list(group["params"]), list(group.get("param_names", ()))) for group in self.optimizer.param_groups]
        try:
            self.show(keep)
            yield
        finally:
            # What is loaded meanwhile puts other groups in their place.
            for group, names, (held, labels) in zip(self.optimizer.param_groups, self.names, before, strict=False):
                _fill(group, held, None if names is None else labels)

    def show(self, keep: Callable[[nn.Parameter], bool]) -> None:
        """Let groups have of what the user put there what ``keep`` says; what was added while it trained is left."""
        for group, parameters, names in zip(self.optimizer.param_groups, self.groups, self.names, strict=False):
            flags = [keep(parameter) for parameter in parameters]
            _fill(group, compress(parameters, flags), None if names is None else compress(names, flags))

    def restore(self) -> None:
        """Give the optimizer all its parameters back; state stays with those that it updated as a whole."""
        for parameter in self.parts:
            self.optimizer.state.pop(parameter, None)
        self.show(lambda _: True)


def _fill(group: dict[str, Any], parameters: Iterable[nn.Parameter], names: Iterable[str] | None) -> None:
    group["params"][:] = parameters
    # A new list: the other may be in a state dict. What a checkpoint names where the user did not is left alone.
    if names is not None and "param_names" in group:
        group["param_names"] = list(names)


def restrict_optimizer(
    optimizer: Optimizer, owned: Collection[nn.Parameter], parts: Mapping[nn.Parameter, AnyPart] | None = None
) -> OptimizerCut:
    """Let an optimizer update only the parameters in ``owned``.

    Groups are edited in place, so that learning-rate schedulers keep their hold on them; a group may become empty.
    State of other parameters is dropped, and so is what state of whole parameters says of other ranks' parts.

    Args:
        parts: Parameters of which this rank has only a part; none by default.
    """
    keep = set(owned)
    groups = tuple(tuple(group["params"]) for group in optimizer.param_groups)
    names = tuple(tuple(group["param_names"]) if "param_names" in group else None for group in optimizer.param_groups)
    cut = OptimizerCut(optimizer=optimizer, groups=groups, names=names, owned=keep, parts=parts or {})
    cut.show(keep.__contains__)
    for parameter in {parameter for group in groups for parameter in group} - keep:
        optimizer.state.pop(parameter, None)
    for parameter, part in cut.parts.items():
        if parameter in optimizer.state:
            # Some optimizers (Adagrad) have state from the start, of the parameter as a whole.
            optimizer.state[parameter] = dict(_take_part(optimizer.state[parameter], part))
    return cut


def own_state_dict(cut: OptimizerCut) -> dict[str, Any]:
    """What the optimizer's own ``state_dict`` gives for the whole model, of whose state this rank has its part."""
    theirs = {number for parameter, number in cut.numbers.items() if parameter not in cut.owned}
    with cut.showing(lambda _: True):
        state_dict: dict[str, Any] = cut.optimizer.state_dict()
    return {**state_dict, "state": {key: entry for key, entry in state_dict["state"].items() if key not in theirs}}


def load_full_optimizer_state(
    cut: OptimizerCut,
    state_dict: Mapping[str, Any],
    *,
    apart: Collection[nn.Parameter] = (),
    loaded: Callable[[list[nn.Parameter]], None] | None = None,
) -> None:
    """Load this rank's part of a ``state_dict`` of an optimizer over the whole model, through the optimizer's class.

    Args:
        apart: Parameters whose state is not to be on the device all at once.
        loaded: Called with each of them when its state is there.

    Raises:
        ValueError: If its groups are not those of the optimizer.
        PlanError: If there is state of which it cannot be told what this rank's part is.
    """
    saved = state_dict["param_groups"]
    sizes, expected = [len(group["params"]) for group in saved], [len(group) for group in cut.groups]
    if sizes != expected:
        raise ValueError(
            f"the saved optimizer has groups of {sizes} parameters, this one of {expected}: they must be the same; "
            "load the checkpoint into the optimizer it was saved from"
        )
    every = list(cut.numbers)
    numbers = {name: number for number, name in enumerate(name for group in saved for name in group["params"])}
    tables = _tables(cut, {name: every[number] for name, number in numbers.items()}, state_dict["state"])
    state: dict[Any, Any] = {}
    alone: dict[int, Any] = {}
    for name, entry in state_dict["state"].items():
        parameter = every[numbers[name]] if name in numbers else None
        if parameter is None:
            state[name] = entry
        elif parameter in cut.owned:
            found = _take_part(entry, cut.parts.get(parameter), tables)
            (alone if parameter in apart else state)[numbers[name]] = found
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved]
    whole = {**state_dict, "state": state, "param_groups": groups}
    with cut.showing(lambda _: True):
        cut.optimizer.load_state_dict(whole)
    for parameter in every:
        if parameter not in cut.owned:
            cut.optimizer.state.pop(parameter, None)
    if alone:
        _load_one_by_one(cut, {**whole, "state": alone}, loaded)


def _load_one_by_one(
    cut: OptimizerCut, state_dict: Mapping[str, Any], loaded: Callable[[list[nn.Parameter]], None] | None
) -> None:
    """Load one parameter's state after the other: an optimizer like the user's says where and of which type it is."""
    other: Any = like(cut.optimizer, [])
    for name in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        setattr(other, name, getattr(cut.optimizer, name))
    before, every = dict(vars(other)), list(cut.numbers)
    for group in state_dict["param_groups"]:
        for place, number in enumerate(group["params"]):
            if number not in state_dict["state"]:
                continue
            names = {"param_names": group["param_names"][place : place + 1]} if "param_names" in group else {}
            one, parameter = {**group, "params": [number], **names}, every[number]
            other.param_groups, other.state = [{**one, "params": [parameter]}], defaultdict(dict)
            other.load_state_dict({**state_dict, "state": {number: state_dict["state"][number]}, "param_groups": [one]})
            cut.optimizer.state[parameter] = other.state[parameter]
            if loaded is not None:
                loaded([parameter])
    # What loading changes of the optimizer itself, it changes once.
    changed = {name: value for name, value in vars(other).items() if before.get(name, before) is not value}
    vars(cut.optimizer).update({key: changed[key] for key in changed if key not in ("state", "param_groups")})


def _tables(cut: OptimizerCut, parameters: Mapping[Any, nn.Parameter], state: Mapping[Any, Any]) -> set[Any]:
    """Paths and shapes of what parameters of several sizes have alike, where this rank has parts of some."""
    sizes: dict[Any, set[int]] = defaultdict(set)
    for name, parameter in parameters.items() if cut.parts else ():
        part = cut.parts.get(parameter)
        for path, leaf in plain_leaves(take_apart(state.get(name))):
            sizes[path, tuple(leaf.shape)].add(parameter.numel() if part is None else math.prod(part.shape))
    return {place for place, found in sizes.items() if len(found) > 1}


def _take_part(entry: Any, part: AnyPart | None, tables: Collection[Any] = ()) -> Any:
    """State of a rank's part of a parameter from that of the whole: what is like it is cut; numbers and tables stay."""
    if part is None:
        return entry
    new = {}
    for path, leaf in leaves_of_part(entry := take_apart(entry), part):
        shape = tuple(leaf.shape)
        if shape == part.shape:
            new[path] = part.take(leaf)
        elif leaf.numel() > 1 and shape != part.local_shape and (path, shape) not in tables:
            raise PlanError(_not_cut(f"{leaf.numel()} entries of {path[-1]!r}", part))
    return with_leaves(entry, new)


def _join_parts(entries: Mapping[int, Any], part: AnyPart | None) -> Any:
    """State of a whole parameter from that of its parts by tensor-parallel index, taken apart."""
    if part is None:
        return entries[0]
    new, others = {}, {index: dict(plain_leaves(entry)) for index, entry in entries.items()}
    first = min(entries)
    # Who has nothing of a parameter has no state of it.
    having = [index for index in range(part.degree) if index in entries or 0 not in part.shape_at(index)]
    for path, leaf in leaves_of_part(entries[first], part):
        if tuple(leaf.shape) == part.shape_at(first):
            known = {index: others[index][path] for index in having}
            new[path] = part.join([known.get(index, leaf[:0]) for index in range(part.degree)])
        elif any(path not in o or not torch.equal(_as_bytes(o[path]), _as_bytes(leaf)) for o in others.values()):
            raise PlanError(_not_cut(f"{leaf.numel()} entries of {path[-1]!r}, which differ between parts,", part))
    return with_leaves(entries[first], new)


def leaves_of_part(entry: Any, part: AnyPart) -> Iterator[tuple[Path, Tensor]]:
    """Tensors by path of a parameter's state, taken apart; none of a class of its own, which would know the shape."""
    for item in leaves(entry):
        if isinstance(item, Wrapping):
            raise PlanError(_not_cut(f"a {item.cls.__name__} of {math.prod(item.size)} entries", part))
    return plain_leaves(entry)


def _not_cut(what: str, part: AnyPart) -> str:
    return (
        f"the optimizer's state has {what} for {part.name} of shape {part.shape}, of which ranks have parts of "
        f"shape {part.local_shape}: only what is like the parameter, or the same for all, can be cut and joined; use "
        "tensor_parallel_degree=1"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# All ranks' state ----------------------------------------------------------------------------------------------------


def gather_optimizer_state(
    cut: OptimizerCut,
    transport: Transport,
    *,
    mine: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> Generator[Work, None, dict[str, Any] | None]:
    """The ``state_dict`` of the whole model on rank 0, its tensors in host memory; None on the others.

    Every rank calls it. Tensors travel one by one, so no other rank holds more than its own.

    Args:
        mine: This rank's state as :func:`own_state_dict` gave it earlier; by default what it is now.
        device: Where tensors travel; by default where the parameters are.

    Raises:
        PlanError: If ranks say different things of what there is once, or parts cannot be joined.
    """
    mine = own_state_dict(cut) if mine is None else mine
    whole = agree_on_rest(cut, transport, mine)
    numbers = cut.numbers
    parts = {numbers[parameter]: part for parameter, part in cut.parts.items() if parameter in numbers}
    own: list[Tensor] = []
    header = take_apart(mine["state"], lambda tensor: _described(tensor, own))
    gathered = transport.all_gather_object((parts, header), tuple(range(transport.world_size)))
    merged: dict[Any, dict[int, Any]] = {}
    degrees: dict[Any, tuple[int, AnyPart | None]] = {}
    tag = _STATE_TAG
    if device is None:
        device = next((p.device for group in cut.groups for p in group), torch.device("cpu"))
    for rank, (of_rank, announced) in enumerate(gathered):
        here: dict[int, Tensor | None] = {}
        for key, entry in announced.items():
            # A copy in a group of devices of another tensor-parallel degree has other parts: the first rank's count.
            part = of_rank.get(key)
            degree, index = (1, 0) if part is None else (part.degree, part.index)
            if degrees.setdefault(key, (degree, part))[0] != degree or index in merged.setdefault(key, {}):
                continue
            for item in leaves(entry):
                if isinstance(item, _Travelling) and id(item) not in here:
                    tag += 1
                    value = own[item.number] if rank == transport.rank else None
                    here[id(item)] = yield from _travel(item, value, rank, tag, transport, device)
            merged[key][index] = rebuild(entry, lambda item, here=here: here.get(id(item)))  # type: ignore[misc]
    if transport.rank:
        return None
    in_order = sorted(merged, key=lambda key: key if isinstance(key, int) else math.inf)
    return {**whole, "state": {key: put_together(_join_parts(merged[key], degrees[key][1])) for key in in_order}}


def agree_on_rest(cut: OptimizerCut, transport: Transport, mine: Mapping[str, Any]) -> dict[str, Any]:
    """What a state dict has beside the state of parameters, the same on all ranks; ``"state"`` is empty.

    A rank that updates nothing of a group may not count its steps: a group's options are those of the first that does.

    Raises:
        PlanError: If ranks say different things.
    """
    every = range(len(cut.numbers))
    rest = {key: value for key, value in mine.items() if key not in ("state", "param_groups")}
    rest |= {f"state[{key!r}]": entry for key, entry in mine["state"].items() if key not in every}
    updates = [any(parameter in cut.owned for parameter in group) for group in cut.groups]
    told = take_apart(rest, lambda leaf: (leaf.shape, leaf.dtype, sha256(_as_bytes(leaf).cpu().numpy().data).digest()))
    every_rank = tuple(range(transport.world_size))
    gathered = transport.all_gather_object((updates, on_host(mine["param_groups"]), told), every_rank)
    first: dict[str, tuple[int, Any]] = {}
    for rank, (_, _, theirs) in enumerate(gathered):
        for key, value in theirs.items():
            by, known = first.setdefault(key, (rank, value))
            # NaN is not equal to itself, and sets have no order.
            if pickle.dumps(value) != pickle.dumps(known) and value != known:
                raise PlanError(
                    f"the optimizer's state_dict() has another {key} on rank {rank} than on rank {by}, and a "
                    'checkpoint has it once: keep it by parameter, or alike on all ranks; or use strategy="ddp"'
                )
    groups = list(mine["param_groups"])
    for place in range(len(cut.groups)):
        ranks = [rank for rank, (updates, *_) in enumerate(gathered) if updates[place]]
        if ranks and transport.rank not in ranks:
            groups[place] = gathered[ranks[0]][1][place]
    return {**mine, "state": {}, "param_groups": groups}


def _travel(
    header: "_Travelling", own: Tensor | None, source: int, tag: int, transport: Transport, device: torch.device
) -> Generator[Work, None, Tensor | None]:
    """One tensor from its source to rank 0, where it is returned in host memory."""
    if own is not None and source == 0:
        return own.detach().contiguous().to("cpu", copy=True)
    if own is not None:
        yield transport.isend(_as_bytes(own).to(device), 0, tag)
    elif transport.rank == 0:
        received = torch.empty(math.prod(header.shape) * header.dtype.itemsize, dtype=torch.uint8, device=device)
        yield transport.irecv(received, source, tag)
        return received.to("cpu").view(header.dtype).reshape(header.shape)
    return None


class _Travelling:
    """Stands in a header for a tensor that follows by itself: which of its rank's, and its form."""

    def __init__(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.number, self.shape, self.dtype = number, shape, dtype


def _described(tensor: Tensor, own: list[Tensor]) -> Any:
    if tensor.numel() <= _HEADER_ELEMENTS:
        return tensor.detach().to("cpu", copy=True)
    own.append(tensor)
    return _Travelling(len(own) - 1, tuple(tensor.shape), tensor.dtype)


def global_grad_norm(
    mesh: Mesh,
    parameters: Mapping[str, nn.Parameter],
    speakers: Mapping[str, Speakers],
    transport: Transport,
    *,
    names: Sequence[str] | None = None,
    norm_type: float = 2.0,
    known: Mapping[str, Tensor] = MappingProxyType({}),
) -> Generator[Work, None, Tensor]:
    """Norm of the gradients of the whole model, as ``torch.nn.utils.get_total_norm`` gives it in a single process.

    One rank answers for each parameter, whatever copies of it exist, or one for each of its parts. The norms of all
    gradients travel as one vector to which each entry is added by one rank only, so every rank takes the same norm of
    the same vector, in the order that a single process would; a parameter without a gradient counts as nothing. Where
    nothing is split and all have gradients, it is the same to the bit. The caller does not wait for a device.

    Args:
        parameters: Every parameter of the module by canonical name; those of other stages have no gradient here.
        speakers: Who answers for each parameter; see
            :func:`~lightning_mist.runtime.parameters.parameter_parts.speakers_of`.
        names: Whose gradients count, in this order, equal on all ranks; every trained parameter if None.
        norm_type: Order of the norm, above 0; may be infinite.
        known: Norms of gradients that are elsewhere, by name.

    Returns:
        A 0-dimensional tensor, the same on every rank.
    """
    items = {item.name: item for item in mesh.parameters if item.requires_grad}
    chosen = [name for name in names if name in items] if names is not None else list(items)
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    if not chosen:
        return torch.tensor(0.0, device=device)
    # One column for every part of every parameter.
    columns = [(name, rank) for name in chosen for rank in speakers[name].ranks]
    here = [parameters[name].grad if rank == mesh.rank and name not in known else None for name, rank in columns]
    vector = _norms(here, norm_type, device)
    for position, (name, rank) in enumerate(columns):
        if rank == mesh.rank and name in known:
            vector[position] = known[name]
    if mesh.plan.world_size > 1:
        yield transport.all_reduce(vector, tuple(range(mesh.plan.world_size)))
    # Back in the gradients' own types, as a single process has them; the way through float64 is exact.
    if len(columns) == len(chosen) and len({parameters[name].dtype for name in chosen}) == 1:
        return _norm_of(vector.to(parameters[chosen[0]].dtype), norm_type)
    norms, start = [], 0
    for name in chosen:
        own = vector[start : start + len(speakers[name].ranks)]
        start += len(own)
        norm = own[0] if len(own) == 1 else _norm_of(own, norm_type)
        norms.append(norm.to(parameters[name].dtype))
    return _norm_of(torch.stack(norms), norm_type)


def _norm_of(values: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm


def _norms(gradients: Sequence[Tensor | None], norm_type: float, device: torch.device) -> Tensor:
    """The norm of each gradient, 0 for None."""
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    norms = [nothing] * len(gradients)
    there = [(position, gradient) for position, gradient in enumerate(gradients) if gradient is not None]
    for dtype in {gradient.dtype for _, gradient in there}:
        part = [(position, gradient) for position, gradient in there if gradient.dtype is dtype]
        found = torch.stack(tuple(torch._foreach_norm([gradient for _, gradient in part], norm_type))).double()
        for (position, _), norm in zip(part, found.unbind(), strict=True):
            norms[position] = norm
    return torch.stack(norms)


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale this rank's gradients, in place, by what brings ``total_norm`` down to ``max_norm``, if it is larger."""
    torch.nn.utils.clip_grads_with_norm_(_with_gradient(parameters), max_norm, total_norm)


def clip_by_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every entry of this rank's gradients to ``[-clip_value, clip_value]``, in place."""
    # torch refuses to clip nothing.
    if having := _with_gradient(parameters):
        torch.nn.utils.clip_grad_value_(having, clip_value)


def _with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]
