"""Running computation, communication and copies together on a CUDA device, and timing them by events.

Streams and what they order
    Each channel has a stream of its own; nothing but the streams lets the channels run at the same time. All of them
    wait for the event ``begin``, so that no load starts while others are still being launched ahead of it, and the
    current stream waits for all of them before it records ``end``.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from lightning_mist.devices import ops_of
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.concurrent_loads import Counts, concurrent_times, fit_interference, kind_of
from lightning_mist.hardware.measure.timing import Session, synchronize
from lightning_mist.hardware.profile import CHANNELS, CollectiveCost, Interference

MATMUL_EDGE = 4096
"""Edge of the products, that of the published measurements (mist): 0.14 TFLOP each."""

PAYLOAD_BYTES = 2**25
"""Bytes of a copy or a collective: more than latencies hide, less than a load has."""


class DeviceBench:
    """Loads on this rank's device and its channels; all ranks run the same at the same time."""

    def __init__(self, session: Session, inside: RankGroup | None, across: RankGroup | None) -> None:
        """Allocate what the units work on."""
        device = session.device
        self._session = session
        self._groups = {False: inside, True: across}
        self._ops = ops_of(device)
        self._streams = tuple(self._ops.stream() for _ in CHANNELS)
        random = torch.Generator(device=device).manual_seed(0)
        shape = (MATMUL_EDGE, MATMUL_EDGE)
        self._left = torch.randn(shape, generator=random, device=device).half()
        self._right = torch.randn(shape, generator=random, device=device).half()
        self._out = torch.empty(shape, dtype=torch.float16, device=device)
        # Zeros: sums of them stay finite however often they are reduced.
        self._message = torch.zeros(PAYLOAD_BYTES // 4, device=device, dtype=torch.float32)
        # Both directions have buffers of their own: a copy must not wait for another one's bytes.
        self._host = [self._ops.host_memory(PAYLOAD_BYTES) for _ in range(2)]
        self._device = [torch.empty(PAYLOAD_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        # The buffers were filled on the current stream, which the channels' streams do not wait for by themselves.
        synchronize(device)

    def seconds(self, counts: Counts, across_nodes: bool) -> float:
        """Seconds until all loads are done, on the slowest rank; see :class:`Bench`."""
        ops = self._ops
        synchronize(self._session.device)
        self._session.agree([0.0])
        synchronize(self._session.device)
        begin = ops.record(timed=True)
        for stream in self._streams:
            ops.wait(begin, stream)
        # Launched in turns, by the part of its load that a channel has launched: no load waits for another's launches.
        turns = [((unit + 0.5) / count, index) for index, count in enumerate(counts) for unit in range(count)]
        for _, index in sorted(turns):
            ops.launch(partial(self._launch, index, across_nodes), self._streams[index])
        for stream in self._streams:
            ops.wait(ops.record(stream))
        end = ops.record(timed=True)
        ops.synchronize(end)
        (slowest,) = self._session.agree([ops.seconds(begin, end)])
        return slowest

    def _launch(self, index: int, across_nodes: bool) -> None:
        """One unit of a channel, on the current stream."""
        channel = CHANNELS[index]
        if channel == "compute":
            torch.mm(self._left, self._right, out=self._out)
        elif channel == "to_device":
            self._device[0].copy_(self._host[0], non_blocking=True)
        elif channel == "to_host":
            self._host[1].copy_(self._device[1], non_blocking=True)
        else:
            group = self._groups[across_nodes]
            if group is None:
                raise ValueError(f"no group {'across nodes' if across_nodes else 'inside the node'} to communicate in")
            dist.all_reduce(self._message, group=group.handle)


def measure_on_device(
    session: Session,
    groups: Sequence[RankGroup],
    *,
    copies: tuple[float, float],
    collectives: Sequence[CollectiveCost],
    budget_seconds: float,
    report: Callable[[], None],
) -> Interference | None:
    """Measure how much the channels of this machine slow each other down, on all ranks at once.

    Returns:
        The coefficients, the same on every rank; None on a CPU, which has no such channels.
    """
    if session.device.type != "cuda":
        return None
    report()
    inside, across = network_groups(groups, 0 if session.world is None else dist.get_rank())
    try:
        networks = [far for far, group in ((False, inside), (True, across)) if group is not None]
        times = concurrent_times(DeviceBench(session, inside, across), networks, budget_seconds)
        return fit_interference(times, kind_of(*copies, collectives), "measured")
    finally:
        # Products on a stream of their own got a workspace of their own, which torch gives back in no other way.
        torch._C._cuda_clearCublasWorkspaces()


def network_groups(groups: Sequence[RankGroup], rank: int) -> tuple[RankGroup | None, RankGroup | None]:
    """The largest group of this rank inside its node, and the largest of all that span nodes."""
    mine = [group for group in groups if rank in group.ranks]
    inside = max((group for group in mine if group.num_nodes == 1), key=lambda group: len(group.ranks), default=None)
    across = max((group for group in mine if group.num_nodes > 1), key=lambda group: len(group.ranks), default=None)
    return inside, across
