"""What one tensor-parallel rank's part of a step costs: the step on fakes, with split parameters in its slots."""

from collections.abc import Sequence
from dataclasses import replace

from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.spec import BILINEAR, ParameterSpec, SplitSpec, TensorSpec
from lightning_mist.model.trace.layer_costs import layer_specs
from lightning_mist.model.trace.modes import run_ways
from lightning_mist.model.trace.rank_step import RankView, present_parts
from lightning_mist.model.trace.sizes import Counted, Step, divisible
from lightning_mist.plan import Exclusion, TensorSplit
from lightning_mist.tensor_parallel import functions_of_wholes


def trace_splits(
    step: Step, counted: Counted, parameters: Sequence[ParameterSpec]
) -> tuple[tuple[SplitSpec, ...], tuple[Exclusion, ...]]:
    """The costs of every split of a step's module map, and which of them cannot be told and why."""
    found, excluded = [], []
    for split in step.module_map.splits:
        for sequence in (False, True) if split.sequence else (False,):
            try:
                found.append(_trace(step, counted, split, parameters, sequence_parallel=sequence))
            except Exception as error:
                name = f"tensor_parallel_degree {split.degree}{' with sequence parallelism' if sequence else ''}"
                reason = f"the costs of {name} cannot be traced: {type(error).__name__}: {error}"
                excluded.append(Exclusion(feature="sequence" if sequence else "tensor", reason=reason))
    return tuple(found), tuple(excluded)


def _trace(
    step: Step, counted: Counted, split: TensorSplit, parameters: Sequence[ParameterSpec], *, sequence_parallel: bool
) -> SplitSpec:
    module_map = step.module_map
    basis = divisible(counted.basis, split.degree) if sequence_parallel else counted.basis
    view, mode = RankView.of(split, sequence_parallel=sequence_parallel), FakeTensorMode(allow_non_fake_inputs=True)
    operators = step.operators.installed(rounds=basis.powers != BILINEAR)
    with step.subject(mode) as whole, functions_of_wholes(), operators:
        parts = present_parts(step.module, whole.parameters, module_map, split, view.context, mode)
        subject = replace(whole, parameters=parts, view=view)
        ways = run_ways(subject, basis, step.sized(basis), counted.blocks.twins, recomputes=counted.blocks.recomputes)
    head, *layers, tail = layer_specs(ways, counted.blocks.kinds.parts(module_map.blocks), is_fake=True)
    return SplitSpec(
        degree=split.degree,
        sequence_parallel=sequence_parallel,
        head=head,
        layers=tuple(layers),
        tail=tail,
        boundaries=_boundaries(step, counted, split.degree) if sequence_parallel else counted.boundaries,
        parameter_bytes=tuple(
            item.bytes if split.of(item.name) is None else item.bytes // split.degree for item in parameters
        ),
    )


def _boundaries(step: Step, counted: Counted, degree: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors that cross each cut, of those that are shared out along the sequence one rank's part."""

    def part(tensor: TensorSpec, dim: int | None) -> TensorSpec:
        if dim is None:
            return tensor
        shape = tuple(size / degree if place == dim else size for place, size in enumerate(tensor.shape))
        return replace(tensor, shape=shape)

    return tuple(
        tuple(part(tensor, live.sequence_dim) for tensor, live in zip(tensors, cut, strict=True))
        for tensors, cut in zip(counted.boundaries, step.module_map.cuts, strict=True)
    )
