"""A map of a machine: which devices of which nodes run which stages, and how fast nodes are connected."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lightning_mist.hardware import AnyCluster, HardwareProfile
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.units import format_rate

# Okabe and Ito, 2008; of more stages a scale that colour-blind readers tell apart too.
PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#999999")

MOST_BOXES = 24
"""Kinds of nodes that are drawn."""

_DARK = ("#0072b2", "#d55e00")


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


def draw_map(plan: Plan, cluster: AnyCluster, profiles: Sequence[HardwareProfile]) -> str:
    """The map, as a part of a page: boxes that flow, so that it can be read on screens of any width."""
    kinds = node_kinds(plan, cluster)
    count, names = sum(len(kind.nodes) for kind in kinds), dict.fromkeys(kind.device for kind in kinds)
    links = [f"{rate} {place}" for nodes, place in _REACH.items() if (rate := rates(profiles, nodes))]
    said = [
        f"A device sends another {', '.join(links)}." if links else "",
        "dp: data-parallel rank, which works on other rows." * any(s.data_parallel_degree > 1 for s in plan.stages),
        "tp: tensor-parallel rank, which has a part of each layer."
        * any(stage.mesh.tensor_parallel_degree > 1 for stage in plan.stages),
        f"{len(kinds) - MOST_BOXES} more kinds of nodes are not drawn." * (len(kinds) > MOST_BOXES),
    ]
    head = f"{count} node{'s' * (count > 1)} of {' and '.join(names)}"
    nodes = "\n".join(_node(plan, kind) for kind in kinds[:MOST_BOXES])
    words = " ".join(filter(None, said))
    return f'<p><b>{escape(head)}</b> {escape(words)}</p>\n<div class="nodes">\n{nodes}\n</div>'


def _node(plan: Plan, kind: NodeKind) -> str:
    """One node with its devices; between those that share each layer there is no gap."""
    squares = []
    for place, behind in zip(kind.places, (*kind.places[1:], None), strict=True):
        color, ink = _colors(place.group, plan.num_groups)
        is_joined = behind is not None and (behind.group, behind.replica) == (place.group, place.replica)
        mesh = plan.stages[place.group].mesh
        words = [f"stage {place.group}{' ...' * (plan.num_groups < plan.num_stages)}"]
        words += [f"dp {place.replica}"] * (mesh.data_parallel_degree > 1)
        words += [f"tp {place.part}"] * (mesh.tensor_parallel_degree > 1)
        joined = ' class="joined"' * is_joined
        squares.append(f'<i{joined} style="background:{color};color:{ink}">{"<br/>".join(words)}</i>')
    return f'<div class="node">{escape(kind.title)}<div>{"".join(squares)}</div></div>'


def _colors(group: int, count: int) -> tuple[str, str]:
    """The colour of a group of devices, of so many, and of what is written on it."""
    if count <= len(PALETTE):
        return PALETTE[group], "white" if PALETTE[group] in _DARK else "black"
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["cividis"](group / count)), "white" if group < count / 2 else "black"
