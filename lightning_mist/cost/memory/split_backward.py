"""What parts need where gradients of their weights are made apart from those of their inputs, from their allocations.

In a backward that makes gradients of inputs only, everything that gradients of weights are made of stays: inputs of
products with them, and gradients of these products. So a part's peak is another one than that of a whole backward, and
a part leaves something behind.

Array axes
    R  regions
    K  allocations of one microbatch
    E  events
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray, RegionCosts, parameter_regions, regions_of
from lightning_mist.model.events import StageShape, StageTemplate, stack
from lightning_mist.model.spec import ModelSpec, Polynomial, values_at


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """What every region needs in a backward that makes gradients of inputs only. Bytes.

    Attributes:
        peak_R: The largest number alive beyond what it and the regions before it have saved, and what the regions
            behind it have left; gradients of parameters exist already and are not counted.
        recompute_peak_R: The same if layers are recomputed.
        waiting_R: What it leaves behind for the gradients of its weights.
        before_cast: Bytes of a weight's gradient in the type of the product, per byte of it; 0 if that is its own type.
    """

    peak_R: FloatArray
    recompute_peak_R: FloatArray
    waiting_R: FloatArray
    before_cast: float = 0.0


class SplitBackwardModel:
    """Says what a network's regions need; keeps what does not depend on rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._template: StageTemplate | None = None
        self._sizes: list[Polynomial] = []
        self._size_K: IntArray = np.empty(0, dtype=np.int64)

    def of(self, costs: RegionCosts, rows: int) -> SplitBackward | None:
        """What the regions need at a number of rows; ``None`` if their allocations are not known one by one."""
        spec = self._spec
        if not spec.num_layers or any(region.events is None for region in regions_of(spec)):
            return None
        if self._template is None:
            whole = StageShape(first=0, end=spec.num_layers, checkpointed=0, rows=rows)
            self._template = stack(spec, whole, ways=(False,))
            # Layers of one kind have the same allocations.
            sizes = {id(item.allocation.size): item.allocation.size for item in self._template.born}
            place = {key: index for index, key in enumerate(sizes)}
            self._sizes = list(sizes.values())
            self._size_K = np.array([place[id(item.allocation.size)] for item in self._template.born], dtype=np.int64)
        bytes_K = np.array(values_at(self._sizes, rows, spec.sequence_length or 1), dtype=np.int64)[self._size_K]
        peak_R, waiting_R = _walk(spec, self._template, bytes_K)
        # A layer that is recomputed is then where one that has kept everything would be.
        recomputed_R = peak_R + costs.saved_R - costs.checkpointed_saved_R
        recompute_peak_R = np.maximum(costs.recompute_backward_peak_R, recomputed_R)
        recompute_peak_R[[0, -1]] = peak_R[[0, -1]]
        shares = [
            item.made_bytes / item.nbytes for item in self._template.weights[False] if item.made_bytes < item.nbytes
        ]
        cast = max(shares, default=0.0)
        return SplitBackward(peak_R=peak_R, recompute_peak_R=recompute_peak_R, waiting_R=waiting_R, before_cast=cast)


def _walk(spec: ModelSpec, template: StageTemplate, bytes_K: IntArray) -> tuple[FloatArray, FloatArray]:
    """Peaks of a backward through the whole network, and what is left."""
    count = spec.num_layers + 2
    alive_K = np.zeros(len(bytes_K), dtype=np.int64)
    saved_R, peak_R = np.zeros(count), np.zeros(count)
    born_K = np.zeros(len(bytes_K), dtype=np.int64)
    for part, run in (*template.forward.items(), *template.inputs[False].items()):
        born_K[run.events_E[run.events_E > 0] - 1] = part
    for run in template.forward.values():
        np.add.at(alive_K, np.abs(run.events_E) - 1, np.sign(run.events_E))
    alive_K[list(template.left)] = 0
    np.add.at(saved_R, born_K, bytes_K * alive_K)
    waiting_R = _waiting(spec, template, born_K, bytes_K)
    current = float(bytes_K @ alive_K)
    for part in reversed(template.parts):
        events_E = template.inputs[False][part].events_E
        delta_E = np.sign(events_E) * bytes_K[np.abs(events_E) - 1]
        live_E = current + np.concatenate([[0.0], np.cumsum(delta_E)])
        peak_R[part] = live_E.max() - saved_R[: part + 1].sum() - waiting_R[part + 1 :].sum()
        current = float(live_E[-1])
    return peak_R, waiting_R


def _waiting(spec: ModelSpec, template: StageTemplate, born_K: IntArray, bytes_K: IntArray) -> FloatArray:
    """Bytes that wait for gradients of weights, by the first region whose backward would have freed them."""
    regions = {item.name: used for item, used in zip(spec.parameters, parameter_regions(spec), strict=True)}
    first_K = np.full(len(bytes_K), spec.num_layers + 1, dtype=np.int64)
    waits_K = np.zeros(len(bytes_K), dtype=bool)
    for weight in template.weights[False]:
        for slot in weight.operands:
            # A tied weight is that of a product where its operands are.
            near = min(regions[weight.name], key=lambda region: abs(region - int(born_K[slot])))
            first_K[slot], waits_K[slot] = min(first_K[slot], near), True
    waiting_R = np.zeros(spec.num_layers + 2)
    np.add.at(waiting_R, first_K, bytes_K * waits_K)
    return waiting_R
