"""Ranges of layers that a stage may have, those that cost the same once.

Stages that are neither first nor last and hold the same kinds of layers in the same order cost the same wherever they
lie, so each such range is looked at once. If all layers are alike the start of these stages is left open altogether.

Array axes
    W  ranges
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_mist.cost.inputs import IntArray, parameter_regions
from lightning_mist.model.spec import ModelSpec

ANYWHERE = -1
"""Start of a choice whose costs do not depend on where it lies."""


def layer_classes(spec: ModelSpec) -> tuple[int, ...]:
    """A number for every layer, equal for layers that cost the same and hand on the same."""
    sizes: list[list[tuple[int, bool]]] = [[] for _ in range(spec.num_layers)]
    alone = set()
    for parameter, regions in zip(spec.parameters, parameter_regions(spec), strict=True):
        for region in regions:
            if 1 <= region <= spec.num_layers:
                sizes[region - 1].append((parameter.bytes, parameter.trainable))
                if len(regions) > 1:
                    alone.add(region - 1)  # It shares a parameter with another part, so its place matters.
    # What the last layer hands on stays inside its stage.
    handed_on = [*spec.boundaries, ()]
    known: dict[Hashable, int] = {}
    result = []
    for index, kind in enumerate(spec.kinds):
        key = (kind, tuple(sorted(sizes[index])), index if index in alone else -1)
        passed = handed_on[index] if index < spec.num_layers - 1 else handed_on[max(0, index - 1)]
        result.append(known.setdefault((key, passed), len(known)))
    return tuple(result)


Role = Literal["only", "first", "middle", "last"]
"""Whether a stage has others before and behind it."""


def role_of(stage_index: int, num_stages: int) -> Role:
    """The role of a stage."""
    if num_stages == 1:
        return "only"
    if stage_index == 0:
        return "first"
    return "last" if stage_index == num_stages - 1 else "middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRanges:
    """Ranges of layers that cost differently.

    Attributes:
        start_W: First layer of one of those that cost the same.
        starts: First layers of all of them, or :data:`ANYWHERE` alone.
    """

    start_W: IntArray
    layers_W: IntArray
    starts: tuple[IntArray, ...]

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self.start_W)

    @property
    def count_W(self) -> IntArray:
        """At how many places each occurs."""
        return np.array([len(starts) for starts in self.starts], dtype=np.int64)

    def take(self, index: IntArray) -> "LayerRanges":
        """Some of them."""
        starts = tuple(self.starts[place] for place in index.tolist())
        return LayerRanges(start_W=self.start_W[index], layers_W=self.layers_W[index], starts=starts)


def fixed_range(first: int, end: int) -> LayerRanges:
    """The one range that a stage may have whose place is settled."""
    start_W = np.array([first], dtype=np.int64)
    return LayerRanges(start_W=start_W, layers_W=np.array([end - first], dtype=np.int64), starts=(start_W,))


def layer_ranges_of(role: Role, num_layers: int, classes: tuple[int, ...]) -> LayerRanges:
    """Every range of layers that a stage may have."""
    lengths = np.arange(1, num_layers)  # Every other stage needs a layer.
    if role == "middle":
        return _middle(num_layers, classes)
    if role == "only":
        start_W, layers_W = np.array([0]), np.array([num_layers])
    elif role == "first":
        start_W, layers_W = np.zeros_like(lengths), lengths
    else:
        start_W, layers_W = num_layers - lengths, lengths
    return LayerRanges(start_W=start_W, layers_W=layers_W, starts=tuple(start_W[:, None]))


def _middle(num_layers: int, classes: tuple[int, ...]) -> LayerRanges:
    """LayerRanges that touch neither end."""
    if len(set(classes)) == 1:
        layers_W = np.arange(1, num_layers - 1)
        starts = (np.array([ANYWHERE]),) * len(layers_W)
        return LayerRanges(start_W=np.ones_like(layers_W), layers_W=layers_W, starts=starts)
    places: dict[Hashable, list[int]] = {}
    for start in range(1, num_layers - 1):
        for end in range(start + 1, num_layers):
            # The class of the layer before tells what is received.
            places.setdefault(classes[start - 1 : end], []).append(start)
    return LayerRanges(
        start_W=np.array([starts[0] for starts in places.values()], dtype=np.int64),
        layers_W=np.array([len(window) - 1 for window in places], dtype=np.int64),  # type: ignore[arg-type]
        starts=tuple(np.array(starts) for starts in places.values()),
    )


def places_behind(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Stage and number of stages of all that may lie behind the first ones of pipelines, the last stage first."""
    found = []
    for behind in range(max(counts, default=1) - 1):
        num_stages = max(behind + 2, min(counts))
        found.append((num_stages - 1 - behind, num_stages))
    return found
