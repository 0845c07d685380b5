"""The least memory that stages need, with nothing, some or all of their state in host memory.

Of a candidate more than one share of each kind of state may be in host memory. Where that is not too much all shares
are looked at; else all or nothing of each kind; else all or nothing of everything together. What is moved takes no
memory of the device but for buffers, so that this last one is near the least.

Array axes
    K  candidates of a table
    C  combinations of shares
    J  candidates with shares
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from time import thread_time
from typing import Literal

import numpy as np

from lightning_mist.cost import StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray, OffloadCandidates
from lightning_mist.cost.memory import PeakParts, host_microbatch_bytes, host_state_bytes, in_flight, phases_of
from lightning_mist.plan import OFFLOADED
from lightning_mist.tuner.candidates import IntraStage, SlotChoices, Table, may_offload, non_dominated
from lightning_mist.tuner.space import Role, role_of

MOST = 1 << 15
"""Candidates of a slot that are evaluated with offload; with more of them fewer shares are looked at."""


Wanted = Literal["device", "device without host limit", "host"]


class LateError(Exception):
    """Time was up before all was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Candidates with shares, and their bytes, that all stages of a role have in common; whether shares are missing."""

    table: Table
    index_J: IntArray
    offload_JO: FloatArray
    parts: PeakParts
    state_J: FloatArray
    microbatch_J: FloatArray
    is_coarse: bool


@dataclass(slots=True, kw_only=True)
class LeastMemory:
    """Knows what stages need at least; keeps what those of one role have in common.

    Attributes:
        deadline: Value of ``thread_time()`` at which to stop.
        wanted: What is least: bytes of the device, with or without a limit of host memory, or of host memory where the
            device's limit is kept.
        known: What was computed, by who makes stages, role and arrangement.
    """

    deadline: float = np.inf
    wanted: Wanted = "device"
    known: dict[tuple[int, tuple[int, int] | None, Role, StageSlot], _Known] = field(default_factory=dict)

    @property
    def is_coarse(self) -> bool:
        """Whether not every share of what may be moved was looked at."""
        return any(item.is_coarse for item in self.known.values())

    def choices(self, intra: IntraStage, slot: StageSlot) -> SlotChoices:
        """For every range of layers of a slot what needs least, these bytes as its peak.

        Raises:
            LateError: If time is up.
        """
        if not intra.space.offload_ratios:
            return _least(intra, intra.choices(slot))
        if thread_time() > self.deadline:
            raise LateError
        role = role_of(slot.stage_index, slot.num_stages)
        # Where a stage of a role lies in the pipeline only tells how many microbatches it has in flight.
        settled = intra.space.layer_range(slot.stage_index, slot.num_stages)
        key = id(intra), settled, role, replace(slot, stage_index=0, num_stages=1, parts=())
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._evaluate(intra, slot)
        phases = phases_of(slot)
        peak_J, host_J = found.parts.peaks(phases), found.state_J + in_flight(phases) * found.microbatch_J
        value_J = host_J if self.wanted == "host" else peak_J
        kept_J = np.flatnonzero(
            {
                "device": host_J <= intra.host_limit,
                "device without host limit": host_J < np.inf,
                "host": peak_J <= intra.memory_limit,
            }[self.wanted]
        )
        choices = found.table.choices(found.index_J[kept_J], value_J[kept_J], None, found.offload_JO[kept_J])
        return _least(intra, intra.inside(slot, choices))

    def _evaluate(self, intra: IntraStage, slot: StageSlot) -> _Known:
        table, memory = intra.everything(slot), intra.model.memory(slot)
        offload_CO, is_coarse = _shares(intra, len(table))
        offload_CO = offload_CO[may_offload(slot, offload_CO)]
        index_J = np.repeat(np.arange(len(table)), len(offload_CO))
        offload_JO = np.tile(offload_CO, (len(table), 1))
        ratios = {f"{name}_K": offload_JO[:, place] for place, name in enumerate(OFFLOADED)}
        candidates = replace(table.candidates(index_J), offload=OffloadCandidates(**ratios))
        needs = memory.needs(slot, candidates)
        return _Known(
            table=table,
            index_J=index_J,
            offload_JO=offload_JO,
            parts=PeakParts.of(needs),
            state_J=host_state_bytes(memory, slot, candidates),
            microbatch_J=host_microbatch_bytes(memory, slot, candidates, needs),
            is_coarse=is_coarse,
        )


def _shares(intra: IntraStage, candidates: int) -> tuple[FloatArray, bool]:
    """The combinations of shares to look at, as many as there is room for, and whether some are left out."""
    ratios, kinds = (0.0, *intra.space.offload_ratios), intra.space.search.offloaded
    for offered in (ratios, (0.0, ratios[-1])):
        if candidates * len(offered) ** len(kinds) <= MOST:
            found = np.array(list(product(*_each(offered, kinds))), dtype=np.float64)
            return found, len(offered) < len(ratios)
    return np.array([[0.0] * len(OFFLOADED), [item[-1] for item in _each(ratios, kinds)]]), True


def _each(ratios: Sequence[float], kinds: Sequence[str]) -> list[Sequence[float]]:
    return [ratios if name in kinds else (0.0,) for name in OFFLOADED]


def _least(intra: IntraStage, choices: SlotChoices) -> SlotChoices:
    """Of choices with the same layers the one with the least peak."""
    group_K = choices.start_K * (intra.space.num_layers + 1) + choices.layers_K
    return choices.take(non_dominated(group_K, choices.peak_K, np.zeros(len(choices))))
