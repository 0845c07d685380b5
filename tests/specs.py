"""Small synthetic networks and machines for the cost model and the tuner."""

import dataclasses

import numpy as np
import sympy

from lightning_mist.cost import StageCandidates, StageSlot
from lightning_mist.hardware import Cluster, CollectiveCost, ComputeRate, Device, HardwareProfile
from lightning_mist.model.spec.model_spec import (
    CollectiveSpec,
    LayerSeconds,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    SelectiveSpec,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.model.spec.polynomial import MICROBATCH as b
from lightning_mist.model.trace.layer_costs import not_recomputed
from lightning_mist.plan import Exclusion, ModuleMap, ParameterUse

ADAMW = OptimizerSpec(
    name="AdamW",
    state_bytes_per_parameter_byte=2.0,
    step_peak_bytes_per_parameter_byte=0.0,
    step_peak_bytes_per_largest=1.0,
    step_moved_bytes_per_parameter_byte=9.0,
    is_entrywise=True,
)


def moved_bytes(work):
    """Bytes that all operators of a direction read and write."""
    return sympy.Add(*(item.moved_bytes for item in work))


def layer(kind="Block", *, width=1000, flops=1e8, operators=20, gradients=0, fixed=0, example="block"):
    """A layer whose bytes are multiples of ``width`` per row: saves 10, hands on 1."""
    whole = lambda factor: sympy.Integer(factor) * width * b + sympy.Integer(fixed)  # noqa: E731
    return LayerSpec(
        kind=kind,
        example=example,
        forward_work=_work(sympy.Integer(int(flops)) * b, whole(30), operators),
        backward_work=_work(sympy.Integer(int(2 * flops)) * b, whole(60), 2 * operators),
        saved_bytes=whole(10),
        checkpointed_saved_bytes=whole(1),
        forward_peak_bytes=whole(12),
        backward_peak_bytes=whole(3) + gradients // 2,
        first_backward_peak_bytes=whole(2) + gradients,
        recompute_backward_peak_bytes=whole(12) + gradients // 2,
        first_recompute_backward_peak_bytes=whole(11) + gradients,
        selective=SelectiveSpec(
            saved_bytes=whole(5),
            forward_peak_bytes=whole(13),
            backward_peak_bytes=whole(8) + gradients // 2,
            first_backward_peak_bytes=whole(7) + gradients,
            work=(OperatorCost(kind="elementwise", flops=sympy.S.Zero, moved_bytes=whole(24), calls=operators - 2),),
        ),
    )


def _work(flops, moved, operators):
    """Two matrix products that do all the computing, and others that move all the bytes."""
    return (
        OperatorCost(kind="matmul", flops=flops, moved_bytes=sympy.S.Zero, calls=2),
        OperatorCost(kind="elementwise", flops=sympy.S.Zero, moved_bytes=moved, calls=operators - 2),
    )


def edge(kind, **options):
    """Head or tail: never recomputed, and keeping the same whether layers are."""
    made = not_recomputed(layer(kind, example="", **options))
    selective = dataclasses.replace(made.selective, saved_bytes=made.saved_bytes)
    return dataclasses.replace(made, checkpointed_saved_bytes=made.saved_bytes, selective=selective)


def spec(
    layers=6,
    *,
    kinds=None,
    widths=(1000,),
    parameter_bytes=40_000,
    edge_bytes=80_000,
    tied=False,
    frozen=(),
    exclusions=(),
    measured=False,
    optimizer=ADAMW,
    precision="32-true",
):
    """A network of ``layers`` blocks with one matrix and one bias each, an embedding and a projection.

    Args:
        layers: Number of blocks.
        kinds: Kind of each block; all 0 by default.
        widths: Bytes handed on per row, by kind.
        parameter_bytes: Bytes of a block's matrix, times 1 + its kind; its bias has a hundredth.
        edge_bytes: Bytes of the embedding and of the projection.
        tied: Whether projection and embedding are one parameter.
        frozen: Names of parameters that are not trained.
        exclusions: Features that are ruled out, as ``(feature, reason)``.
        measured: Whether the kinds have measured seconds.
        optimizer: The optimizer.
        precision: Lightning's name.
    """
    kinds = tuple(kinds) if kinds is not None else (0,) * layers
    blocks = tuple(f"blocks.{index}" for index in range(layers))
    uses, parameters = [], []

    def add(name, size, slots):
        kept = name not in frozen
        uses.append(ParameterUse(name=name, slots=slots, shape=(size // 4,), dtype="float32", requires_grad=kept))
        parameters.append(ParameterSpec(name=name, numel=size // 4, bytes=size, trainable=kept))

    embedding = (("wte", "weight", (-1,)),)
    add("wte.weight", edge_bytes, (*embedding, ("head", "weight", (layers - 1,))) if tied else embedding)
    for index, block in enumerate(blocks):
        size = parameter_bytes * (1 + kinds[index])
        add(f"{block}.weight", size, ((block, "weight", (index,)),))
        add(f"{block}.bias", size // 100, ((block, "bias", (index,)),))
    if not tied:
        add("head.weight", edge_bytes, (("head", "weight", (layers - 1,)),))
    specs = tuple(
        layer(f"Block{kind}", width=width, flops=1e8 * (1 + kind), gradients=int(parameter_bytes * (1 + kind) * 1.01))
        for kind, width in enumerate(widths)
    )
    crossing = tuple(
        (
            TensorSpec(
                shape=(b, sympy.Integer(widths[kinds[cut]] // 4)),
                dtype="float32",
                itemsize=4,
                requires_grad=True,
            ),
        )
        for cut in range(layers - 1)
    )
    seconds = tuple(
        LayerSeconds(kind=kind, rows=(1, 2, 4), forward=(f, 2 * f, 3 * f), backward=(2 * f, 3 * f, 6 * f))
        for kind, f in [
            ("head", 1e-4),
            ("tail", 3e-4),
            *((item.kind, 1e-3 * (1 + index)) for index, item in enumerate(specs)),
        ]
    )
    return ModelSpec(
        name="synthetic",
        module_map=ModuleMap(
            step="training_step",
            blocks=blocks,
            cuts=(),
            parameters=tuple(uses),
            exclusions=tuple(Exclusion(feature=feature, reason=reason) for feature, reason in exclusions),
            batch_rows=4,
        ),
        head=edge("head", width=100, flops=1e6, operators=3, gradients=edge_bytes),
        layers=specs if layers else (),
        kinds=kinds,
        tail=edge("tail", width=400, flops=5e7, operators=5, gradients=edge_bytes),
        boundaries=crossing,
        parameters=tuple(parameters),
        buffer_bytes=64,
        batch_bytes=16 * b,
        batch_rows=4,
        sequence_length=None,
        optimizer=optimizer,
        precision=precision,
        seconds=seconds if measured else (),
    )


def with_splits(network, *kinds):
    """The network with costs of tensor parallelism, ``kinds`` being ``(degree, sequence parallel)``.

    A rank has an equal part of every matrix and of all costs, whole biases, and whole boundaries but under sequence
    parallelism; it exchanges what its layer hands on, twice in either direction.
    """
    return dataclasses.replace(network, splits=tuple(_split(network, *kind) for kind in kinds))


def _split(network, degree, sequence):
    exchanged = sympy.Integer(2000) * b
    names = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    collectives = tuple(CollectiveSpec(operation=name, calls=2, bytes=exchanged) for name in names)

    def sizes_of(item):
        names = [field.name for field in dataclasses.fields(item) if field.name.endswith(("_bytes", "_flops"))]
        return {name: getattr(item, name) / degree for name in names if getattr(item, name) is not None}

    def less(work):
        sizes = ("flops", "moved_bytes")
        return tuple(
            dataclasses.replace(item, **{name: getattr(item, name) / degree for name in sizes}) for item in work
        )

    def part(item, exchanges):
        again = dataclasses.replace(item.selective, **sizes_of(item.selective), work=less(item.selective.work))
        changes = sizes_of(item) | {"selective": again}
        changes |= {name: less(getattr(item, name)) for name in ("forward_work", "backward_work")}
        return dataclasses.replace(item, **changes, forward_collectives=exchanges, backward_collectives=exchanges)

    def tensors(cut):
        shrunk = [dataclasses.replace(item, shape=(*item.shape[:-1], item.shape[-1] / degree)) for item in cut]
        return tuple(shrunk) if sequence else cut

    return SplitSpec(
        degree=degree,
        sequence_parallel=sequence,
        head=part(network.head, ()),
        layers=tuple(part(item, collectives) for item in network.layers),
        tail=part(network.tail, collectives),
        boundaries=tuple(map(tensors, network.boundaries)),
        parameter_bytes=tuple(
            item.bytes if item.name.endswith("bias") else item.bytes // degree for item in network.parameters
        ),
    )


def cluster(devices=4, *, nodes=1, memory=10**9, kind="cpu"):
    """Equal devices on equal nodes."""
    return Cluster(
        num_nodes=nodes,
        devices_per_node=devices // nodes,
        device=Device(name="test", memory_bytes=memory, kind=kind),
    )


def profile(*, flops_per_second=1e10, bytes_per_second=1e9, link=1e8, latency=1e-4):
    """A machine with every collective in pairs."""
    return HardwareProfile(
        device="test",
        source="made up",
        compute=(
            ComputeRate(
                dtype="float32",
                flops=(1e6, 1e9),
                flops_per_second=(flops_per_second / 2, flops_per_second),
                spread=0.0,
            ),
        ),
        memory_bytes_per_second=bytes_per_second,
        operator_seconds=1e-6,
        collectives=tuple(
            CollectiveCost(
                operation=operation,
                group_size=2,
                num_nodes=1,
                latency_seconds=latency,
                bytes_per_second=link,
                spread=0.0,
            )
            for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
        ),
    )


def slot_of(**changes):
    """A slot of the only stage, on one device, of a batch of one row."""
    sizes = {"stage_index": 0, "num_stages": 1, "num_microbatches": 1, "data_parallel_degree": 1, "rows": 1}
    return StageSlot(**{**sizes, "batch_rows": 1, **changes})


def candidates_of(start, end, checkpointed=0, zero=0, **columns):
    """Candidates for a stage from columns, and from numbers, which hold for all of them."""
    every = np.broadcast_arrays(*map(np.atleast_1d, (start, end, checkpointed, zero)))
    names = ("start_K", "end_K", "checkpointed_K", "zero_stage_K")
    return StageCandidates(**dict(zip(names, map(np.copy, every), strict=True)), **columns)
