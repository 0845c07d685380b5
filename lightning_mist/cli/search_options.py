"""Which plans a command looks at, as options: the limits of a search, under the same names."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lightning_mist.plan import ScheduleName

if TYPE_CHECKING:
    from lightning_mist.tuner import SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Which plans are looked at. Several values are separated by commas.

    Attributes:
        max_stages: The most pipeline stages.
        num_stages: The numbers of pipeline stages, such as 2,4; null for all up to max_stages.
        num_microbatches: The numbers of microbatches, such as 64; null for all that the batch allows.
        microbatch_sizes: The numbers of rows of a microbatch on one device, such as 1,2; null for all.
        layer_cuts: The first layers of all stages but the first, such as 12,24, if they are settled.
        equal_stages: Whether all stages have equally many layers and devices.
        devices_per_stage: The numbers of devices of a stage, such as 8; null for every divisor of all devices.
        zero_stages: Which ZeRO stages may be used.
        data_parallel_degrees: How many devices of a stage may compute on different rows, such as 4; null for all.
        tensor_parallel_degrees: How many devices of a node may share every layer, 1 among them; null for all that the
            module allows.
        sequence_parallel: Whether devices that share layers share the sequence between them too; null for what is
            faster.
        checkpointing: Whether layers may be recomputed in backward.
        checkpointed_shares: Which parts of each stage's layers may be recomputed, such as 0,1; null for any number.
        offload: What may be in host memory, such as optimizer, of parameters, gradients, optimizer and activations;
            null for all of them on devices with memory of their own, [] for nothing.
        offload_ratios: Which parts of each of these may be there.
        schedules: Pipeline schedules to choose from, of 1f1b, gpipe, interleaved-1f1b and zb-h1.
        chunks: The numbers of stages on one group of devices that are tried under interleaved-1f1b.
        solver_seconds: The most seconds that the search may take; the plan then says how far from the best it may be.
    """

    max_stages: int | None = None
    num_stages: tuple[int, ...] | None = None
    num_microbatches: tuple[int, ...] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    layer_cuts: tuple[int, ...] | None = None
    equal_stages: bool = False
    devices_per_stage: tuple[int, ...] | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    data_parallel_degrees: tuple[int, ...] | None = None
    tensor_parallel_degrees: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    checkpointing: bool = True
    checkpointed_shares: tuple[float, ...] | None = None
    offload: tuple[str, ...] | None = None
    offload_ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "zb-h1")
    chunks: tuple[int, ...] = (2, 3, 4)
    solver_seconds: float = 60.0

    def space(self) -> "SearchSpace":
        """The same for the search."""
        from lightning_mist.tuner import SearchSpace

        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        return SearchSpace(**values)
