"""Plans of stages that are given as mappings, and random valid plans, drawn by hypothesis."""

from itertools import pairwise
from math import gcd, lcm
from typing import get_args

from hypothesis import strategies as st

from lightning_mist.plan import (
    Checkpointing,
    OffloadRatios,
    Plan,
    Predicted,
    PredictedStage,
    StageMesh,
    StagePlan,
    StepWork,
    Transfers,
    UpdateAfter,
    ZeroStage,
)

finite = st.floats(0, 1e9, allow_nan=False)
ratios = st.floats(0, 1)


def plan_of(batch, microbatches, *stages, groups=None, **changes):
    """A plan for ``batch`` rows from mappings, one for each stage.

    Their keys are ``layers``, how many (1), ``data``, ``tensor`` and ``context``, the degrees (1), ``devices`` (the
    next ones in order), ``sequence``, ``shard``, ``zero``, ``checkpointed``, how many, ``kind`` of recomputation,
    ``offload``, ratios by name, and ``tail``, chunks behind the last layer, which those of the last stage are. Of
    ``groups`` of devices each runs every so many-th stage, if that is given.
    """
    made, first, next_rank = [], 0, 0
    for index, stage in enumerate(stages):
        data, tensor, context = (stage.get(name, 1) for name in ("data", "tensor", "context"))
        if groups is not None and index % groups == 0:
            next_rank = 0
        devices = tuple(stage.get("devices", range(next_rank, next_rank + data * tensor * context)))
        next_rank, last = next_rank + len(devices), first + stage.get("layers", 1)
        mesh = StageMesh(
            devices=devices,
            data_parallel_degree=len(devices) // (tensor * context),
            tensor_parallel_degree=tensor,
            context_parallel_degree=context,
            sequence_parallel=stage.get("sequence", False) and tensor > 1,
            shard_degree=stage.get("shard"),
        )
        options = {
            "zero_stage": ZeroStage(stage.get("zero", 0)),
            "checkpointing": Checkpointing(layers=stage.get("checkpointed", 0), kind=stage.get("kind", "full")),
            "offload": OffloadRatios(**stage.get("offload", {})),
        }
        if index == len(stages) - 1:
            options["tail_chunks"] = stage.get("tail", 1)
        rows = batch // (microbatches * mesh.data_parallel_degree)
        made.append(StagePlan(layers=(first, last), mesh=mesh, microbatch_size=rows, **options))
        first = last
    return Plan(global_batch_size=batch, num_microbatches=microbatches, stages=tuple(made), **changes)


@st.composite
def plans(
    draw,
    *,
    max_stages=4,
    max_devices=6,
    max_microbatches=24,
    num_layers=None,
    runnable=True,
    tensor_degrees=(1,),
    predicted=False,
    fewer_loaders=False,
):
    """Plans whose parts never mix the batches of two ranks.

    Args:
        max_stages: Most stages.
        max_devices: Most devices over all stages.
        max_microbatches: Most microbatches, unless the degrees need more.
        num_layers: Layers over all stages; drawn if None.
        runnable: Only what the present runtime executes: no context parallelism, no offload.
        tensor_degrees: Tensor-parallel degrees of runnable plans; others have 1 or 2.
        predicted: Whether plans carry predictions and a fingerprint.
        fewer_loaders: Whether there may be fewer data loaders than devices.
    """
    degrees = draw(_degrees(max_stages if num_layers is None else min(max_stages, num_layers), max_devices))
    widths = [draw(st.sampled_from(tensor_degrees if runnable else [1, 2, 4])) for _ in degrees]
    world_size = sum(degree * width for degree, width in zip(degrees, widths, strict=True))
    loaders = world_size
    if fewer_loaders:
        loaders = draw(st.sampled_from([count for count in range(1, world_size + 1) if world_size % count == 0]))
    smallest = lcm(*(loaders // gcd(loaders, degree) for degree in degrees))
    num_microbatches = smallest * draw(st.integers(1, max(1, max_microbatches // smallest)))
    parts = [num_microbatches * degree // loaders for degree in degrees]
    batch_rows = lcm(*parts) * draw(st.integers(1, 2))
    devices = draw(st.permutations(range(world_size)))
    schedule, chunks = draw(
        _schedules(len(degrees), num_microbatches, max_stages if num_layers is None else num_layers)
    )
    layers = draw(_layers(len(degrees) * chunks, num_layers))
    groups, first_device = [], 0
    for degree, width, part in zip(degrees, widths, parts, strict=True):
        context = 1 if runnable or width != 4 else 2
        zero = ZeroStage(draw(st.integers(0, 3)))
        within = [count for count in range(2, degree * context) if degree * context % count == 0]
        mesh = StageMesh(
            devices=tuple(devices[first_device : first_device + degree * width]),
            data_parallel_degree=degree,
            tensor_parallel_degree=width if runnable or width != 4 else 2,
            context_parallel_degree=context,
            sequence_parallel=width > 1 and draw(st.booleans()),
            shard_degree=draw(st.sampled_from([None, *within])) if zero and within else None,
        )
        offload = OffloadRatios() if runnable else draw(st.builds(OffloadRatios, *[], **_OFFLOAD))
        groups.append({"mesh": mesh, "microbatch_size": batch_rows // part, "zero_stage": zero, "offload": offload})
        first_device += degree * width
    stages, first_layer = [], 0
    for group, count in zip(groups * chunks, layers, strict=True):
        checkpointing = Checkpointing(layers=draw(st.integers(0, count)))
        stages.append(StagePlan(layers=(first_layer, first_layer + count), checkpointing=checkpointing, **group))
        first_layer += count
    return Plan(
        global_batch_size=batch_rows * loaders,
        data_parallel_size=None if loaders == world_size else loaders,
        num_microbatches=num_microbatches,
        stages=tuple(stages),
        schedule=schedule,
        predicted=draw(_predicted(len(stages))) if predicted else None,
        fingerprint=draw(_fingerprints) if predicted else (),
    )


@st.composite
def _schedules(draw, num_groups, num_microbatches, max_stages):
    """A schedule, and how many stages it gives each group of devices."""
    choices = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1)]
    if num_groups > 1 and num_microbatches % num_groups == 0:
        choices += [("interleaved-1f1b", chunks) for chunks in range(2, max_stages // num_groups + 1)]
    return draw(st.sampled_from(choices))


_OFFLOAD = {"parameters": ratios, "gradients": ratios, "optimizer": ratios, "activations": ratios}
_names = st.text(min_size=1, max_size=12)
_fingerprints = st.dictionaries(_names, st.text(max_size=12), max_size=3).map(lambda d: tuple(d.items()))


@st.composite
def _degrees(draw, max_stages, max_devices):
    """Data-parallel degrees of each stage; many repeats and common factors, so that replicas and re-slices occur."""
    num_stages = draw(st.integers(1, min(max_stages, max_devices)))
    room = max_devices // num_stages
    if draw(st.booleans()):
        return [draw(st.integers(1, room))] * num_stages
    return draw(st.lists(st.integers(1, room), min_size=num_stages, max_size=num_stages))


@st.composite
def _layers(draw, num_stages, num_layers):
    """Numbers of layers of each stage."""
    if num_layers is None:
        return draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    cuts = draw(st.permutations(range(1, num_layers)))[: num_stages - 1]
    edges = [0, *sorted(cuts), num_layers]
    return [end - start for start, end in pairwise(edges)]


_works = st.builds(
    StepWork,
    model_flops=finite,
    peak_flops_per_second=finite,
    peak_source=_names,
    roofline_seconds=finite,
    sequence_length=st.none() | st.integers(1, 4096),
)


@st.composite
def _predicted(draw, num_stages):
    stage = st.builds(
        PredictedStage,
        steady_seconds=finite,
        boundary_seconds=finite,
        forward_seconds=finite,
        backward_seconds=finite,
        peak_bytes=st.integers(0, 2**50),
        breakdown=st.dictionaries(_names, finite, max_size=3).map(lambda d: tuple(d.items())),
        spent=st.dictionaries(_names, finite, max_size=3).map(lambda d: tuple(d.items())),
        needs=st.dictionaries(_names, finite, max_size=3).map(lambda d: tuple(d.items())),
    )
    stages = draw(st.lists(stage, min_size=num_stages, max_size=num_stages))
    return Predicted(
        step_seconds=draw(finite),
        stages=tuple(stages),
        transfers=draw(st.sampled_from(get_args(Transfers))),
        update_after=draw(st.sampled_from(get_args(UpdateAfter))),
        work=draw(st.none() | _works),
    )
