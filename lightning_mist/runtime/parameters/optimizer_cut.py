"""The user's optimizer over a part of the model: which parameters it updates, clipping, and its state in one piece.

The optimizer is the one that the user built over the whole module. It is cut by removing from its groups what this rank
does not update; a checkpoint still has the layout that a single process or data parallelism gives, with parameters
numbered through all groups as the user listed them. Of a parameter that tensor parallelism has shared out the rank
updates its part; state with one value per entry is shared out in the same way, other state is the same on all ranks.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.tensor_parts import Part, Speakers

_STATE_TAG = 1 << 22
"""First tag of gathered optimizer state; all other tags are smaller."""

_HEADER_ELEMENTS = 256
"""State of at most so many elements (step counters, for example) travels inside the header instead of by itself."""

OptimizerState = Mapping[int, Mapping[str, Any]]
"""State by the number of its parameter in the layout of the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCut:
    """An optimizer that updates a part of its parameters, and what it was before.

    Attributes:
        groups: For each group of the optimizer, every parameter that the user put there.
        names: For each group, the names that came with the parameters; None if none did.
        parts: Of which parameters this rank has a part.
    """

    optimizer: Optimizer
    groups: tuple[tuple[nn.Parameter, ...], ...]
    names: tuple[tuple[str, ...] | None, ...]
    parts: Mapping[nn.Parameter, Part] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[Tensor, int]:
        """The number of each parameter in the layout of the whole model."""
        parameters = [parameter for group in self.groups for parameter in group]
        return {parameter: number for number, parameter in enumerate(parameters)}

    @contextmanager
    def showing(self, keep: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        """Inside, groups have of what the user put there what ``keep`` says; afterwards what they had before."""
        groups = [group for group, _ in zip(self.optimizer.param_groups, self.groups, strict=False)]
        before = [(tuple(group["params"]), tuple(group.get("param_names", ()))) for group in groups]
        chosen = [[keep(parameter) for parameter in parameters] for parameters in self.groups]
        try:
            for group, parameters, names, flags in zip(groups, self.groups, self.names, chosen, strict=False):
                _fill(group, compress(parameters, flags), () if names is None else compress(names, flags))
            yield
        finally:
            for group, (parameters, labels) in zip(groups, before, strict=True):
                _fill(group, parameters, labels)

    def restore(self) -> None:
        """Give the optimizer all its parameters back; state stays with those that it updated as a whole."""
        for parameter in self.parts:
            self.optimizer.state.pop(parameter, None)
        # Groups that were added while it trained are left as they are.
        for group, parameters, names in zip(self.optimizer.param_groups, self.groups, self.names, strict=False):
            _fill(group, parameters, names or ())


def _fill(group: dict[str, Any], parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
    group["params"][:] = parameters
    if "param_names" in group:
        group["param_names"][:] = names


def restrict_optimizer(
    optimizer: Optimizer, owned: Collection[nn.Parameter], parts: Mapping[nn.Parameter, Part] | None = None
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
    for group, parameters, labels in zip(optimizer.param_groups, groups, names, strict=True):
        group["params"][:] = [parameter for parameter in parameters if parameter in keep]
        if labels is not None:
            group["param_names"][:] = [
                label for label, parameter in zip(labels, parameters, strict=True) if parameter in keep
            ]
    for parameter in [parameter for parameter in optimizer.state if parameter not in keep]:
        del optimizer.state[parameter]
    for parameter, part in (parts or {}).items():
        if parameter in optimizer.state:
            # Some optimizers (Adagrad) have state from the start, of the parameter as a whole.
            optimizer.state[parameter] = dict(_take_part(optimizer.state[parameter], part))
    return OptimizerCut(optimizer=optimizer, groups=groups, names=names, parts=parts or {})


def local_optimizer_state(cut: OptimizerCut) -> dict[int, dict[str, Any]]:
    """This rank's optimizer state by the numbers of the whole model; parts where it has parts."""
    numbers = cut.numbers
    return {numbers[parameter]: dict(state) for parameter, state in cut.optimizer.state.items()}


def full_optimizer_state(cut: OptimizerCut, states: Iterable[OptimizerState]) -> dict[str, Any]:
    """A ``state_dict`` as an optimizer over the whole model gives it.

    Args:
        states: State of all ranks, of whole parameters; where several have a parameter's, the first counts.
    """
    merged: dict[int, dict[str, Any]] = {}
    for state in states:
        for number, entry in state.items():
            merged.setdefault(number, dict(entry))
    groups = []
    start = 0
    own = cut.optimizer.state_dict()["param_groups"]
    for group, parameters, names in zip(own, cut.groups, cut.names, strict=True):
        entry = {**group, "params": list(range(start, start + len(parameters)))}
        if names is not None:
            entry["param_names"] = list(names)
        groups.append(entry)
        start += len(parameters)
    return {"state": {number: merged[number] for number in sorted(merged)}, "param_groups": groups}


def load_full_optimizer_state(
    cut: OptimizerCut,
    state_dict: Mapping[str, Any],
    *,
    apart: Collection[nn.Parameter] = (),
    loaded: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Load this rank's part of a ``state_dict`` of an optimizer over the whole model.

    Args:
        apart: Parameters whose state is not to be on the device all at once.
        loaded: Called when the state of one of them is there.

    Raises:
        ValueError: If its groups are not those of the optimizer.
    """
    saved = state_dict["param_groups"]
    sizes, expected = [len(group["params"]) for group in saved], [len(group) for group in cut.groups]
    if sizes != expected:
        raise ValueError(
            f"the saved optimizer has groups of {sizes} parameters, this one of {expected}: they must be the same; "
            "load the checkpoint into the optimizer it was saved from"
        )
    state: dict[int, Any] = {}
    alone: dict[nn.Parameter, tuple[Any, dict[str, Any]]] = {}
    groups: list[dict[str, Any]] = []
    start = 0
    for old, full, own in zip(saved, cut.groups, cut.optimizer.param_groups, strict=True):
        mine = set(own["params"])
        kept = [(number, i) for i, (number, p) in enumerate(zip(old["params"], full, strict=True)) if p in mine]
        entry = {**old, "params": list(range(start, start + len(kept)))}
        if "param_names" in old:
            entry["param_names"] = [old["param_names"][i] for _, i in kept]
        groups.append(entry)
        for local, (number, i) in enumerate(kept, start):
            if number in state_dict["state"]:
                found = _take_part(state_dict["state"][number], cut.parts.get(full[i]))
                if full[i] in apart:
                    alone[full[i]] = found, entry
                else:
                    state[local] = found
        start += len(kept)
    cut.optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, (found, entry) in alone.items():
        # An optimizer of one parameter, of the same class: it says where loaded state belongs and of which type it is.
        other = copy.copy(cut.optimizer)
        other.param_groups, other.state = [{**entry, "params": [parameter]}], defaultdict(dict)
        other.load_state_dict({"state": {0: found}, "param_groups": [{**entry, "params": [0]}]})
        cut.optimizer.state[parameter] = other.state[parameter]
        if loaded is not None:
            loaded(parameter)


def _take_part(entry: Mapping[str, Any], part: Part | None) -> Mapping[str, Any]:
    """State of a rank's part of a parameter from that of the whole."""
    if part is None:
        return entry
    return {
        key: part.take(value) if isinstance(value, Tensor) and tuple(value.shape) == part.shape else value
        for key, value in entry.items()
    }


def _join_parts(entries: Mapping[int, dict[str, Any]], part: Part | None) -> dict[str, Any]:
    """State of a whole parameter from that of its parts by tensor-parallel index."""
    first = entries[0]
    if part is None:
        return first
    return {
        key: part.join([entries[index][key] for index in range(part.degree)])
        if isinstance(value, Tensor) and tuple(value.shape) == part.local_shape
        else value
        for key, value in first.items()
    }


def gather_optimizer_state(
    cut: OptimizerCut,
    transport: Transport,
    *,
    destination: int = 0,
    mine: Mapping[int, dict[str, Any]] | None = None,
    device: torch.device | None = None,
) -> Generator[Work, None, dict[str, Any] | None]:
    """The ``state_dict`` of the whole model on one rank, its tensors in host memory; None on the others.

    Every rank calls it. Tensors travel one by one, so no rank but the destination holds more than its own.

    Args:
        mine: This rank's state as :func:`local_optimizer_state` gave it earlier; by default what it is now.
        device: Where tensors travel; by default where the parameters are.
    """
    mine = local_optimizer_state(cut) if mine is None else mine
    numbers = cut.numbers
    parts = {numbers[parameter]: part for parameter, part in cut.parts.items() if parameter in numbers}
    header = {
        number: (parts.get(number), {key: _describe(value) for key, value in entry.items()})
        for number, entry in mine.items()
    }
    gathered = transport.all_gather_object(header, tuple(range(transport.world_size)))
    yield gathered
    merged: dict[int, dict[int, dict[str, Any]]] = {}
    shared: dict[int, Part | None] = {}
    tag = _STATE_TAG
    if device is None:
        device = next((p.device for group in cut.groups for p in group), torch.device("cpu"))
    for rank, announced in enumerate(gathered.result()):
        for number, (part, entry) in announced.items():
            # A copy in a group of devices of another tensor-parallel degree has other parts: the first rank's count.
            known = shared.setdefault(number, part)
            index = 0 if part is None else part.index
            if _degree(known) != _degree(part) or index in merged.setdefault(number, {}):
                continue
            merged[number][index] = values = dict(entry)
            for key, value in entry.items():
                if not isinstance(value, _Travelling):
                    continue
                tag += 1
                own = mine[number][key] if rank == transport.rank else None
                values[key] = yield from _travel(value, own, rank, destination, tag, transport, device)
    if transport.rank != destination:
        return None
    return full_optimizer_state(cut, [{n: _join_parts(entries, shared[n]) for n, entries in merged.items()}])


def _degree(part: Part | None) -> int:
    return 1 if part is None else part.degree


def _travel(
    header: "_Travelling",
    own: Tensor | None,
    source: int,
    destination: int,
    tag: int,
    transport: Transport,
    device: torch.device,
) -> Generator[Work, None, Tensor | None]:
    """One tensor from its source to the destination, where it is returned in host memory."""
    if own is not None and source == destination:
        return own.detach().contiguous().to("cpu", copy=True)
    if own is not None:
        yield transport.isend(own.detach().contiguous().to(device), destination, tag)
    elif transport.rank == destination:
        received = torch.empty(header.shape, dtype=header.dtype, device=device)
        yield transport.irecv(received, source, tag)
        return received.to("cpu")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travelling:
    """Stands in a header for a tensor that follows by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() <= _HEADER_ELEMENTS:
        return value.detach().cpu()
    return _Travelling(shape=tuple(value.shape), dtype=value.dtype)


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
            :func:`~lightning_mist.runtime.parameters.tensor_parts.speakers_of`.
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
