"""How the devices of a stage are arranged, and what they recompute: what is settled before its layers are."""

from dataclasses import dataclass

from lightning_mist.plan import CheckpointingKind, StageMesh, StagePlan
from lightning_mist.plan.search_space import SearchSpace


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How the devices of a stage are arranged.

    Attributes:
        sequence: Whether tensor-parallel devices are sequence-parallel too.
        checkpointing: What of recomputed layers they recompute.
        shard: Ranks that ZeRO shards over, 0 if all with the same parameters.
    """

    data: int
    tensor: int = 1
    sequence: bool = False
    checkpointing: CheckpointingKind = "full"
    shard: int = 0

    @classmethod
    def of(cls, stage: StagePlan) -> "Shape":
        """That of a stage."""
        mesh = stage.mesh
        degrees = mesh.data_parallel_degree, mesh.tensor_parallel_degree
        return cls(*degrees, mesh.sequence_parallel, stage.checkpointing.kind, mesh.shard_degree or 0)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor

    def mesh(self, devices: tuple[int, ...]) -> StageMesh:
        """These devices so arranged."""
        return StageMesh(
            devices=devices,
            data_parallel_degree=self.data,
            tensor_parallel_degree=self.tensor,
            sequence_parallel=self.sequence,
            shard_degree=self.shard or None,
        )


def shard_degrees(search: SearchSpace, data: int) -> tuple[int, ...]:
    """Over how many of some ranks ZeRO may shard, 0 for all of them."""
    if not any(search.zero_stages):
        return (0,)
    return (0, *(count for count in sorted(set(search.shard_degrees)) if count < data and data % count == 0))
