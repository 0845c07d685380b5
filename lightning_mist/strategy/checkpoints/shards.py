"""What one rank has of the tensors in a checkpoint, and which rank writes what.

Each parameter and each tensor of optimizer state is in a directory once, written by a rank that updates it; what
several ranks update alike DCP deals out to them. Of a parameter that tensor parallelism has shared out each rank writes
its part, which may lie in several places of the whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_mist.leaves import take_apart, with_leaves
from lightning_mist.runtime.parameters import (
    AnyPart,
    OptimizerCut,
    agree_on_rest,
    at_work,
    leaves_of_part,
    own_state_dict,
)
from lightning_mist.strategy.training import Engine
from lightning_mist.tensors import rebuild


class Shards:
    """Pieces of a tensor that this rank has, or none, by where each begins in the whole, which has a shape.

    DCP asks it for what it needs to write or to fill them.
    """

    def __init__(self, shape: Sequence[int] = (), pieces: Mapping[tuple[int, ...], Tensor] | None = None) -> None:
        self._shape, self.pieces = torch.Size(shape), pieces or {}

    @classmethod
    def of_part(cls, local: Tensor, part: AnyPart) -> "Shards":
        """Views of a rank's part of a tensor."""
        return cls(part.shape, dict(part.placed(local)))

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self._shape

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(piece), size=self._shape
                ),
            )
            for chunk, piece in zip(self.__create_chunk_list__(), self.pieces.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(place), sizes=value.size()) for place, value in self.pieces.items()
        ]

    def piece(self, index: MetadataIndex) -> Tensor:
        """One of the pieces."""
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


def copied(value: Any) -> Any:
    """A copy in host memory of what is in a checkpoint."""

    def copy(node: Any) -> Any:
        if isinstance(node, Shards):
            return Shards(node.size(), copied(node.pieces))
        return node.detach().to("cpu", copy=True) if isinstance(node, Tensor) else None

    return rebuild(value, copy)


def _owned(engine: Engine) -> set[str]:
    """The parameters that this rank updates and writes: of copies on several stages the first."""
    mesh = engine.executor.mesh
    return {item.name for item in mesh.owned if item.stages[0] == mesh.stage}


def model_shards(module: nn.Module, engine: Engine | None, *, is_first: bool) -> dict[str, Any]:
    """A module's ``state_dict`` in which each rank has what it writes; rank 0, the first, all that is no parameter."""
    if engine is None or engine.is_filled:
        state, values = module.state_dict(), None
    else:
        values = _owned_values(engine)
        with engine.parts_may_leave():
            state = module.state_dict()
    names = {name: parameter for name, parameter in module.named_parameters(remove_duplicate=False) if name in state}
    for name in state:
        if name in names:
            if engine is not None and values is not None:
                state[name] = values.get(engine.canonical_name(names[name]), Shards())
        elif not is_first:
            state[name] = Shards()
    return state


def _owned_values(engine: Engine) -> dict[str, Any]:
    engine.executor.flush()
    home, every, even = engine.gatherer.home_values(), engine.stages.every, engine.executor.even
    parts: dict[str, AnyPart] = {**engine.parts, **even.parts}
    with at_work():
        own = {name: even.part_of(name, home) for name in even.parts}
        values = {name: own[name] if name in own else home.get(name, every[name].detach()) for name in _owned(engine)}
    return {name: Shards.of_part(v, parts[name]) if name in parts else v for name, v in values.items()}


def optimizer_shards(engine: Engine, optimizer: Any = None, *, is_first: bool) -> dict[str, Any]:
    """Optimizer state by the names of parameters, of what this rank writes; rank 0 has all else.

    Every rank calls it.
    """
    engine.executor.flush()
    (mine := engine.owned(optimizer)).settle()
    owned, cut = _owned(engine), mine.cut
    every = list(cut.numbers)
    names, state_dict = [engine.canonical_name(parameter) for parameter in every], own_state_dict(cut)
    whole = {**agree_on_rest(cut, engine.transport, state_dict), "state": (state := {})}
    for key, entry in state_dict["state"].items():
        is_parameters = key in range(len(every))
        if not is_parameters or names[key] in owned:
            state[key] = _shared_out(entry, cut.parts.get(every[key]) if is_parameters else None)
    found = named_state(whole, names)
    return found if is_first else {"state": found["state"]}


def _shared_out(entry: Any, part: AnyPart | None) -> Any:
    if part is None:
        return entry
    found = leaves_of_part(entry := take_apart(entry), part)
    here = {path: leaf for path, leaf in found if tuple(leaf.shape) == part.local_shape}
    return with_leaves(entry, {path: Shards.of_part(leaf, part) for path, leaf in here.items()})


def named_state(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's ``state_dict`` with the names of parameters in place of their numbers, taken apart."""
    if not state:
        return {}
    entries = {names[key] if isinstance(key, int) else key: entry for key, entry in state["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    found: dict[str, Any] = take_apart({**state, "state": entries, "param_groups": groups})
    return found


def names_in_order(optimizer: Any, module: nn.Module) -> list[str]:
    """Canonical names of an optimizer's parameters by their numbers; those that are not the module's are numbered."""
    known = {parameter: name for name, parameter in module.named_parameters()}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(parameter, f"parameter {number}") for number, parameter in enumerate(every)]


def saved_parts(cut: OptimizerCut, groups: Sequence[Mapping[str, Any]]) -> dict[str, AnyPart | None]:
    """Of which saved parameters this rank updates what part; by their places in the saved groups, as torch has it."""
    saved = [name for group in groups for name in group["params"]]
    mine = {parameter for group in cut.optimizer.param_groups for parameter in group["params"]}
    every = [parameter for group in cut.groups for parameter in group]
    # Groups of other sizes are refused where the state is loaded.
    return {name: cut.parts.get(p) for name, p in zip(saved, every, strict=False) if p in mine}
