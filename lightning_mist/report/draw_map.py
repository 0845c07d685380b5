"""A map of a machine: which devices of which nodes run which stages, and how fast nodes are connected."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any, NamedTuple

from lightning_mist.hardware import AnyCluster, HardwareProfile
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.report.figures import INK, LEFT, RIGHT, WIDTH
from lightning_mist.units import format_rate

# Okabe and Ito, 2008; of more stages a scale that colour-blind readers tell apart too.
PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#999999")

MOST_BOXES = 24
"""Kinds of nodes that are drawn."""

_DARK = ("#0072b2", "#d55e00")

_SQUARE, _GAP, _MARGIN = 0.46, 0.55, 0.03
"""Inches of a device, between nodes, and around each device."""


class Place(NamedTuple):
    """A device: its stage's group of devices, and its data- and tensor-parallel indices there."""

    rank: int
    group: int
    replica: int
    part: int


class NodeKind(NamedTuple):
    """Nodes whose devices run the same parts of the same stages, for different rows; the devices of the first."""

    device: str
    nodes: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def title(self) -> str:
        """Which they are, and how many."""
        text, count = ranges(self.nodes), len(self.nodes)
        short = text if len(text) <= 16 else text[:13] + "..."
        return f"nodes {short} (x {count})" if count > 1 else f"node {text}"


def node_kinds(plan: Plan, cluster: AnyCluster) -> tuple[NodeKind, ...]:
    """The nodes of a cluster, alike ones together."""
    places = {}
    for group in range(plan.num_groups):
        mesh = plan.stages[group].mesh
        for at, rank in enumerate(mesh.devices):
            places[rank] = Place(rank, group, *divmod(at, len(mesh.devices) // mesh.data_parallel_degree))
    found: dict[object, NodeKind] = {}
    number = 0
    for part, offset in zip(cluster.parts, cluster.offsets, strict=True):
        for first in range(offset, offset + part.world_size, part.devices_per_node):
            own = tuple(places[rank] for rank in range(first, first + part.devices_per_node))
            begin = {
                group: min(item.replica for item in own if item.group == group) for group in {p.group for p in own}
            }
            key = offset, tuple((item.group, item.replica - begin[item.group], item.part) for item in own)
            known = found.get(key, NodeKind(part.device.name, (), own))
            found[key] = known._replace(nodes=(*known.nodes, number))
            number += 1
    return tuple(found.values())


def rates(profiles: Sequence[HardwareProfile], nodes: int) -> str:
    """How fast a device sends to another one in so many nodes, by what the plan was priced with; nothing if none is."""
    found = {
        cost.bytes_per_second
        for profile in profiles
        for cost in profile.collectives
        if cost.operation == "send_recv" and cost.num_nodes == nodes
    }
    return " or ".join(format_rate(rate, "B/s") for rate in sorted(found))


_REACH = {1: "inside a node", 2: "between nodes"}


def map_figure(plan: Plan, cluster: AnyCluster, profiles: Sequence[HardwareProfile]) -> Any:
    """The map, as a figure of matplotlib."""
    from matplotlib.figure import Figure

    kinds = node_kinds(plan, cluster)
    shown = kinds[:MOST_BOXES]
    most = max(len(kind.places) for kind in shown)
    columns = most if most <= 4 else max(4, ceil(sqrt(most)))
    width, height = columns * _SQUARE + _GAP, ceil(most / columns) * _SQUARE + 0.4
    across = max(1, int((WIDTH - LEFT - RIGHT + _GAP) / width))
    inches = ceil(len(shown) / across) * height
    top, inner = inches + 0.65, WIDTH - LEFT - RIGHT
    figure = Figure(figsize=(WIDTH, top))
    axis = figure.add_axes((LEFT / WIDTH, 0.0, inner / WIDTH, inches / top))
    axis.set(xlim=(0, inner), ylim=(-inches, 0))
    axis.set_axis_off()
    for index, kind in enumerate(shown):
        left, upper = index % across * width, -(index // across) * height - 0.25
        _draw_node(axis, plan, kind, left, upper, columns)
        if index + 1 < len(shown) and (index + 1) % across:
            middle, right = upper - _SQUARE / 2, left + columns * _SQUARE
            axis.plot([right, right + _GAP], [middle] * 2, color=INK, linewidth=0.8)
            rate = rates(profiles, 2)
            axis.text(right + _GAP / 2, middle + 0.04, rate if len(rate) < 12 else "", fontsize=6, ha="center")
    count, names = sum(len(kind.nodes) for kind in kinds), dict.fromkeys(kind.device for kind in kinds)
    links = [f"{rate} {place}" for nodes, place in _REACH.items() if (rate := rates(profiles, nodes))]
    said = [
        f"a device sends another {', '.join(links)}" if links else "",
        "copy: of the stage, on other rows" * any(stage.data_parallel_degree > 1 for stage in plan.stages),
        "part: of each layer" * any(stage.mesh.tensor_parallel_degree > 1 for stage in plan.stages),
        f"{len(kinds) - len(shown)} more kinds of nodes are not drawn" * (len(kinds) > len(shown)),
    ]
    head = f"{count} node{'s' * (count > 1)} of {' and '.join(names)}"
    figure.text(LEFT / WIDTH, 1 - 0.22 / top, head, fontsize=11, fontweight="bold", va="center")
    figure.text(LEFT / WIDTH, 1 - 0.44 / top, "; ".join(filter(None, said)), fontsize=8.5, va="center")
    return figure


def _draw_node(axis: Any, plan: Plan, kind: NodeKind, left: float, top: float, columns: int) -> None:
    """One node with its devices; between those that share each layer there is no gap."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    def draw(x: float, y: float, width: float, height: float, **style: Any) -> None:
        axis.add_patch(Rectangle((x, y), width, height, **style))

    count, rows = plan.num_groups, ceil(len(kind.places) / columns)
    axis.text(left, top + 0.06, kind.title, fontsize=8.5)
    draw(left, top - rows * _SQUARE, columns * _SQUARE, rows * _SQUARE, fill=False, edgecolor=INK, linewidth=0.8)
    for index, (place, behind) in enumerate(zip(kind.places, (*kind.places[1:], None), strict=True)):
        x, y = left + index % columns * _SQUARE, top - (index // columns + 1) * _SQUARE
        many = count > len(PALETTE)
        color = colormaps["cividis"](place.group / count) if many else PALETTE[place.group]
        is_joined = behind is not None and (behind.group, behind.replica) == (place.group, place.replica)
        room = _SQUARE - _MARGIN if is_joined and (index + 1) % columns else _SQUARE - 2 * _MARGIN
        draw(x + _MARGIN, y + _MARGIN, room + _MARGIN * is_joined, _SQUARE - 2 * _MARGIN, facecolor=color, linewidth=0)
        mesh = plan.stages[place.group].mesh
        several = " ..." * (plan.num_groups < plan.num_stages)
        words = [f"stage {place.group}{several}"] + [f"copy {place.replica}"] * (mesh.data_parallel_degree > 1)
        words += [f"part {place.part}"] * (mesh.tensor_parallel_degree > 1)
        ink = "white" if (place.group < count / 2 if many else color in _DARK) else "black"
        middle = x + _SQUARE / 2, y + _SQUARE / 2
        axis.text(*middle, "\n".join(words), fontsize=6, ha="center", va="center", color=ink)
