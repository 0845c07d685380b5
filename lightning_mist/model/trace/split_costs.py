"""What one tensor-parallel rank's part of a step costs: the step on fakes, with split parameters in its slots."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.device import DeviceOperators
from lightning_mist.model.fakes import device_of, isolated, quiet_fakes, substitute_parameters
from lightning_mist.model.spec import BILINEAR, Basis, ParameterSpec, SplitSpec, TensorSpec
from lightning_mist.model.trace.block_kinds import Kinds
from lightning_mist.model.trace.counted_step import Subject
from lightning_mist.model.trace.layer_costs import layer_specs, not_recomputed
from lightning_mist.model.trace.modes import run_ways
from lightning_mist.model.trace.rank_step import RankView, present_parts
from lightning_mist.model.trace.sizes import Resize, divisible, sized
from lightning_mist.plan import Exclusion, ModuleMap, TensorSplit
from lightning_mist.tensor_parallel import functions_of_wholes


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A step that was traced unsplit."""

    module: nn.Module
    batch: Any
    module_map: ModuleMap
    call: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    resize: Resize | None
    basis: Basis
    kinds: Kinds
    twins: Sequence[int | None]
    recomputes: bool
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    operators: DeviceOperators


def trace_splits(
    step: WholeStep, parameters: Sequence[ParameterSpec]
) -> tuple[tuple[SplitSpec, ...], tuple[Exclusion, ...]]:
    """The costs of every split of a step's module map, and which of them cannot be told and why."""
    found, excluded = [], []
    for split in step.module_map.splits:
        for sequence in (False, True) if split.sequence else (False,):
            try:
                found.append(_trace(step, split, parameters, sequence_parallel=sequence))
            except Exception as error:
                name = f"tensor_parallel_degree {split.degree}{' with sequence parallelism' if sequence else ''}"
                reason = f"the costs of {name} cannot be traced: {type(error).__name__}: {error}"
                excluded.append(Exclusion(feature="sequence" if sequence else "tensor", reason=reason))
    return tuple(found), tuple(excluded)


def _trace(
    step: WholeStep, split: TensorSplit, parameters: Sequence[ParameterSpec], *, sequence_parallel: bool
) -> SplitSpec:
    module, module_map = step.module, step.module_map
    basis = divisible(step.basis, split.degree) if sequence_parallel else step.basis
    owners = {(name, attr): regions for use in module_map.parameters for name, attr, regions in use.slots if regions}
    view, mode = RankView.of(split, sequence_parallel=sequence_parallel), FakeTensorMode(allow_non_fake_inputs=True)
    operators = step.operators.installed(rounds=basis.powers != BILINEAR)
    with isolated(module), quiet_fakes(), functions_of_wholes(), operators:
        stand_ins = substitute_parameters(module, mode, owners, device_of(step.batch))
        subject = Subject(
            module=module,
            blocks=tuple(module.get_submodule(name) for name in module_map.blocks),
            parameters=present_parts(module, stand_ins, module_map, split, view.context, mode),
            mode=mode,
            call=step.call,
            context=step.context,
            view=view,
        )
        ways = run_ways(
            subject,
            basis,
            partial(sized, step.batch, basis, resize=step.resize),
            step.twins,
            recomputes=step.recomputes,
        )
    head, *layers, tail = layer_specs(ways, step.kinds.parts(module_map.blocks), is_fake=True)
    return SplitSpec(
        degree=split.degree,
        sequence_parallel=sequence_parallel,
        head=not_recomputed(head),
        layers=tuple(layers),
        tail=not_recomputed(tail),
        boundaries=_boundaries(step, split.degree) if sequence_parallel else step.boundaries,
        parameter_bytes=tuple(
            item.bytes if split.of(item.name) is None else item.bytes // split.degree for item in parameters
        ),
    )


def _boundaries(step: WholeStep, degree: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors that cross each cut, of those that are shared out along the sequence one rank's part."""

    def part(tensor: TensorSpec, dim: int | None) -> TensorSpec:
        if dim is None:
            return tensor
        shape = tuple(size / degree if place == dim else size for place, size in enumerate(tensor.shape))
        return replace(tensor, shape=shape)

    return tuple(
        tuple(part(tensor, live.sequence_dim) for tensor, live in zip(tensors, cut, strict=True))
        for tensors, cut in zip(step.boundaries, step.module_map.cuts, strict=True)
    )
