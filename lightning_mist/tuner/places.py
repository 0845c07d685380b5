"""Places of stages in pipelines: what a stage is asked about by, and what tells what is known of it from others."""

from collections.abc import Hashable, Sequence

from lightning_mist.cost import StageSlot
from lightning_mist.tuner.space import Shape, Space, common_unit
from lightning_mist.tuner.windows import Role

TableKey = tuple[Role, int, tuple[int, int] | None, Hashable]
"""Role, number of microbatches, layer range where it is settled, and where the pipeline passes from one part of the
cluster to another."""

FrontierKey = tuple[TableKey, int, int]
"""What tells frontiers apart: the table, the stages behind as far as they count, a number for the situations."""

Place = tuple[int, int, tuple[int, ...]]
"""A stage, the number of stages, and the parts of the cluster in which these lie, if it has unlike ones."""


def slot_of(spaces: Sequence[Space], place: Place, num_microbatches: int, shape: Shape) -> StageSlot:
    """A slot with an arrangement of devices.

    Args:
        spaces: The search space, and those of other parts of the cluster.
        place: Where the stage is.
        num_microbatches: Number of microbatches.
        shape: How its devices are arranged.
    """
    stage_index, num_stages, pipeline = place
    replicas = common_unit(space.least_replicas(num_microbatches) for space in spaces)
    return StageSlot(
        stage_index=stage_index,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        data_parallel_degree=shape.data,
        rows=spaces[0].rows(num_microbatches, shape.data),
        batch_rows=spaces[0].batch_rows,
        replicas=shape.data if num_stages == 1 else replicas,
        schedule=spaces[0].schedule,
        tensor_parallel_degree=shape.tensor,
        sequence_parallel=shape.sequence,
        parts=pipeline,
    )
