"""Fitted numbers of a machine: how fast it computes, moves and communicates. Seconds, bytes, FLOP/s."""

from dataclasses import dataclass

from lightning_mist.hardware.profile.interference_model import Interference

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv")
"""Collectives that are measured; sending and receiving only in pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """Matrix multiplication speed of one device at several problem sizes.

    Attributes:
        flops: Floating-point operations per call, ascending.
        flops_per_second: Median rate at each size, all devices of the node busy.
        spread: Median absolute deviation over median, the worst of all sizes.
    """

    dtype: str
    flops: tuple[float, ...]
    flops_per_second: tuple[float, ...]
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Speed of a kind of operators whose time is that of moving bytes.

    Attributes:
        kind: ``elementwise``, ``reduction``, ``index`` or ``copy``, as operators are sorted when a network is traced.
        bytes: Bytes read plus written per call, ascending.
        spread: Median absolute deviation over median, the worst of all sizes and both directions.
    """

    kind: str
    bytes: tuple[float, ...]
    forward_bytes_per_second: tuple[float, ...]
    backward_bytes_per_second: tuple[float, ...]
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """Speed of a kind of operators that compute, but no matrix products.

    Attributes:
        kind: ``attention`` or ``causal_attention`` (fused), or ``convolution``.
        forward_flops_per_second: Floating-point operations as they are counted (scores that a causal mask hides count)
            per second, in forward.
        backward_flops_per_second: The same in backward, where attention's five products count.
        spread: Median absolute deviation over median, the worse of both directions.
        width: Numbers in a head of the attention that it is about; 0 for all.
        forward_half_length, backward_half_length: Tokens of a sequence at which attention has half of these rates.
        idle_rows: As many rows of queries as would take what multiprocessors idle at the end of a launch.
    """

    kind: str
    dtype: str
    forward_flops_per_second: float
    backward_flops_per_second: float
    spread: float
    width: int = 0
    forward_half_length: float = 0.0
    backward_half_length: float = 0.0
    idle_rows: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of one collective of a payload, which is the whole un-sharded tensor.

    It is ``latency + fill min(1, payload / fill_bytes) + payload / bandwidth``.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce`` or ``send_recv``.
        fill_seconds: What large messages take more, whose protocol fills a pipeline before it is at its rate.
        fill_bytes: From what payload on all of that is paid.
        spread: Relative spread of the fit's residuals.
    """

    operation: str
    group_size: int
    num_nodes: int
    latency_seconds: float
    bytes_per_second: float
    spread: float
    fill_seconds: float = 0.0
    fill_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverheads:
    """Seconds of a step in which the runtime's own Python runs and devices wait for it.

    Measured as what steps of a module with next to no computation take, over numbers of microbatches and stages. On a
    device the host runs ahead, so that only what it cannot hide counts.

    Attributes:
        step_seconds: Once per optimizer step: Lightning's loop, exchanging batches and losses, installing gradients.
        action_seconds: Each forward or backward of a microbatch, or part of one, beyond what its operators take.
        message_seconds: Each message that is posted, at either end, beyond what its transfer takes.
        exchange_seconds: Once per optimizer step where ranks of one replica (stages, tensor-parallel peers) tell each
            other their batches and losses.
        stand_in_seconds: Each operator before the first layer of a later stage, which runs there on stand-ins without
            values, in every forward.
        split_operator_seconds: Each operator on tensors that tensor-parallel ranks share out, in forward; half as much
            again is spent on it in backward.
        unit_seconds: Each layer's parameters that are unsharded, or gradients that are reduced, from ZeRO-2 on.
        recomputed_layer_seconds: Each recomputed layer, beyond its second forward.
        deferred_operator_seconds: Each operator of a backward whose gradients of weights are put off (ZB-H1), which
            makes it two actions.
    """

    step_seconds: float = 0.0
    action_seconds: float = 0.0
    message_seconds: float = 0.0
    exchange_seconds: float = 0.0
    stand_in_seconds: float = 0.0
    split_operator_seconds: float = 0.0
    unit_seconds: float = 0.0
    recomputed_layer_seconds: float = 0.0
    deferred_operator_seconds: float = 0.0

    def once(self, *, shares_batches: bool) -> float:
        """Seconds once per optimizer step."""
        return self.step_seconds + (self.exchange_seconds if shares_batches else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What runs have taught of one kind of terms of predictions.

    See :mod:`lightning_mist.hardware.profile.corrections`.

    Attributes:
        factor: By what predicted seconds are multiplied.
        ratios: What the last runs measured over what was expected of them without a factor.
    """

    term: str
    factor: float
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Everything measured of, or catalogued for, one kind of device in one kind of cluster.

    Attributes:
        source: Where the numbers come from: ``"measured"`` with host and date, or catalog sources.
        memory_bytes_per_second: Bytes read plus written per second by large element-wise operators.
        rates: Rates of what is limited by memory, by kind of operator; a kind that is not there moves bytes as
            element-wise operators do, these at ``memory_bytes_per_second`` if they are not there either.
        kernels: Rates of fused attention and of convolutions, by kind and element type; what is not there computes like
            matrix products with as many operations.
        host_to_device_bytes_per_second: Pinned copies to the device; 0 where there is no separate device, or what a
            CPU copies from the files that offloaded state is in.
        host_bytes_per_second_per_node: What all devices of a node together copy in one direction; 0 if nothing is known
            beyond the rates of one device. Rates that were measured with all devices copying contain it already.
        interference: How far computation, communication and copies slow each other down; None where they take turns.
        overheads: What the runtime's own Python takes; nothing where it was not measured.
        stack: Whose kernels it is about; a measured one is of torch as this runtime runs it.
    """

    device: str
    source: str
    compute: tuple[ComputeRate, ...]
    memory_bytes_per_second: float
    operator_seconds: float
    collectives: tuple[CollectiveCost, ...]
    host_to_device_bytes_per_second: float = 0.0
    device_to_host_bytes_per_second: float = 0.0
    host_bytes_per_second_per_node: float = 0.0
    interference: Interference | None = None
    overheads: StepOverheads = StepOverheads()
    rates: tuple[MemoryRate, ...] = ()
    kernels: tuple[KernelRate, ...] = ()
    corrections: tuple[Correction, ...] = ()
    stack: str = "eager"
