"""``lightning-mist estimate``: what a plan needs of every device's memory, before anything runs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import open_cluster, precision_of
from lightning_mist.cli.html_output import check_drawn
from lightning_mist.cli.network import NetworkOptions, NetworkRequest, closed_network, describe_network
from lightning_mist.cli.output import answer, display, say
from lightning_mist.errors import PlanError, TraceError
from lightning_mist.plan import OFFLOAD_KINDS, CheckpointingKind, OffloadRatios, Plan, ScheduleName, load, plan_of

if TYPE_CHECKING:
    from lightning_mist.estimate import Estimator, SweepPoint
    from lightning_mist.hardware import AnyCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A plan by degrees.

    Attributes:
        data_parallel_degree: Replicas of every stage; by default what the other degrees leave of the devices.
        tensor_parallel_degree: Devices that share every layer.
        context_parallel_degree: Devices that share the sequence.
        sequence_parallel: Whether tensor-parallel devices share activations along the sequence too.
        pipeline_stages: Groups of devices that layers are dealt to.
        chunks: Stages of each group, under interleaved-1f1b.
        num_microbatches: Parts of a batch.
        microbatch_size: Rows of each part on one data-parallel device.
        zero_stage: What data-parallel devices share out, 0 to 3.
        shard_degree: How many data-parallel devices do so among themselves, if not all (HSDP).
        checkpointed_layers: How many of every stage's first layers are recomputed in backward, or all.
        checkpointing: What of these is recomputed: full, or selective for all but matrix products, convolutions and
            attention.
        schedule: Of 1f1b, gpipe, interleaved-1f1b and zb-h1.
        offload: What lives in host memory, such as "optimizer=1 activations=0.5".
    """

    data_parallel_degree: int | None = None
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    sequence_parallel: bool = False
    pipeline_stages: int = 1
    chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    zero_stage: int = 0
    shard_degree: int | None = None
    checkpointed_layers: str = "0"
    checkpointing: CheckpointingKind = "full"
    schedule: ScheduleName = "1f1b"
    offload: str = ""


_DEGREES: dict[str, Any] = {field.name: field.default for field in fields(Degrees)}
"""Options that describe a plan by degrees, with their defaults."""

_NUMBERS = tuple(name for name, value in _DEGREES.items() if value is None or type(value) is int)
"""Those of them that are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """On what to estimate, and how to show it.

    Attributes:
        cluster: Such as 4x8xL4 (nodes x devices x device), a cluster.yaml, a profile.json that lightning-mist profile
            wrote, or "local" for this machine; with --plan also one of unlike devices, 8xA100-40+2x8xV100-32.
        global_batch_size: Rows that one batch brings over all devices; by default one for each device.
        plan: A plan file, in place of the degrees that follow.
        memory_limit: The most memory of each device that may be used, such as 22GiB.
        allocator: Settings of torch's allocator as in PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True.
        sweep: Values to go through, such as "microbatch_size=1,2,4 zero_stage=1,3".
        json: Print JSON on stdout and nothing else there.
        picture: Where to draw the bytes of every stage over one step, as .png, .pdf or .svg; needs matplotlib.
        closed_form: Do not trace: estimate a transformer from its sizes alone, in a moment and less exactly.
    """

    cluster: str
    global_batch_size: int | None = None
    plan: str | None = None
    memory_limit: str | None = None
    allocator: str = ""
    sweep: str | None = None
    json: bool = False
    picture: str | None = None
    closed_form: bool = False


def estimate(*, network: NetworkOptions, request: EstimateRequest, degrees: Degrees) -> None:
    """Say what a plan needs of every device's memory, and what would make it fit.

    Args:
        network: What to estimate.
        request: On what, and how to show it.
        degrees: A plan by degrees.
    """
    from lightning_mist.estimate import Estimator, combinations, limit_of, parse_sweep
    from lightning_mist.estimate.allocator import parse_allocator_settings
    from lightning_mist.hardware import single

    sweep = request.sweep
    _check_picture(request.picture, sweep)
    given = _given(request.plan, asdict(degrees), sweep)
    machine, _ = open_cluster(request.cluster)
    if given is None:
        machine = single(machine, "an estimate without --plan")
    roomiest = max(machine.parts, key=lambda part: part.device.memory_bytes)
    limit = limit_of(roomiest, request.memory_limit)
    axes = {} if sweep is None else parse_sweep(sweep, ("global_batch_size", "seq_len", *_DEGREES))
    rows = _rows(request, given, machine)
    base = {**asdict(degrees), "global_batch_size": rows, "seq_len": network.seq_len}
    points = [{**base, **dict(values)} for values in combinations(axes)] if axes else [base]
    if given is None:
        _check_degrees(points, machine, refuse=not axes)
    settings = parse_allocator_settings(request.allocator, roomiest.device.memory_bytes)
    open_as = partial(Estimator, cluster=machine, limit=limit, allocator=settings)
    wanted, known = _degrees_of(given, points), dict[int | None, Estimator]()

    def open_one(seq_len: int | None, rows: int) -> Estimator:
        """The estimator for sequences of a length, for each of which the network is traced once."""
        if seq_len not in known:
            precision = precision_of(machine, network.precision, master_weights=network.master_weights)
            each = max(1, rows // machine.world_size)
            asked = network.on(machine, precision, rows=each, seq_len=seq_len, degrees=wanted)
            known[seq_len] = _opened(asked, open_as, closed=request.closed_form)
        return known[seq_len]

    if axes:
        found = [_point(open_one, base, values) for values in combinations(axes)]
        _print_sweep(found, request.json)
        if all(point.estimate is None for point in found):
            raise PlanError(f"sweep {sweep!r}: none of the {len(found)} combinations is a plan: {found[0].error}")
    else:
        estimator = open_one(network.seq_len, rows)
        shown = given or _plan(estimator.spec.num_layers, machine, base)
        _print_estimate(estimator, shown, request.json, request.picture)


def _opened(request: NetworkRequest, open_as: "Callable[..., Estimator]", *, closed: bool) -> "Estimator":
    """Trace, or take the closed form where that is asked for or nothing else is possible."""
    if closed:
        return open_as(closed_network(request), source="closed form (asked for)")
    try:
        return open_as(describe_network(request))
    except TraceError as error:
        try:
            spec = closed_network(request)
        except ValueError:
            raise error from None
        return open_as(spec, source=f"closed form ({error})")


def _given(path: str | None, degrees: Mapping[str, Any], sweep: str | None) -> Plan | None:
    """The plan file, which leaves nothing to say by degrees."""
    if path is None:
        return None
    said = [f"--{name.replace('_', '-')}" for name, value in degrees.items() if value != _DEGREES[name]]
    said += ["--sweep"] if sweep is not None else []
    if said:
        raise ValueError(f"--plan {path} with {', '.join(said)}: a plan says it all; leave one or the other out")
    return load(path)


def _rows(request: EstimateRequest, given: Plan | None, machine: "AnyCluster") -> int:
    """Rows of a batch: as asked for, of the plan file, or one for each device."""
    rows = request.global_batch_size
    if given is None:
        return machine.world_size if rows is None else rows
    if rows not in (None, given.global_batch_size):
        raise ValueError(
            f"global_batch_size = {rows}: {request.plan} is for {given.global_batch_size} rows; leave it out"
        )
    return given.global_batch_size


def _degrees_of(given: Plan | None, points: list[dict[str, Any]]) -> tuple[int, ...]:
    """The tensor-parallel degrees beyond 1 that are asked for."""
    if given is not None:
        found = {stage.mesh.tensor_parallel_degree for stage in given.stages}
    else:
        found = {_number("tensor_parallel_degree", point["tensor_parallel_degree"]) for point in points}
    return tuple(sorted(found - {1}))


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} = {value!r}: a whole number is needed") from None


_LAYERS_TO_COME = 10_000
"""Layers of each stage that are supposed before the network has been looked at: more than any has."""


def _plan(num_layers: int, cluster: "AnyCluster", values: Mapping[str, Any]) -> Plan:
    numbers = {name: values[name] for name in (*_NUMBERS, "global_batch_size")}
    layers = str(values["checkpointed_layers"])
    return plan_of(
        num_layers,
        world_size=cluster.world_size,
        devices_per_node=cluster.devices_per_node,
        sequence_parallel=_truth(values["sequence_parallel"]),
        checkpointed_layers="all" if layers == "all" else _number("checkpointed_layers", layers),
        checkpointing=values["checkpointing"],
        schedule=values["schedule"],
        offload=_offload(values["offload"]),
        **{name: None if value is None else _number(name, value) for name, value in numbers.items()},  # type: ignore[arg-type]
    )


def _check_degrees(points: list[dict[str, Any]], machine: "AnyCluster", *, refuse: bool) -> None:
    """Say what is no number, and where asked what does not divide, before the network is looked at: that takes time."""
    for point in points:
        stages = _number("pipeline_stages", point["pipeline_stages"]) * _number("chunks", point["chunks"])
        try:
            _plan(_LAYERS_TO_COME * max(1, stages), machine, point)
        except PlanError:
            if refuse:
                raise


def _truth(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"sequence_parallel = {value!r}: true or false is needed")
    return str(value).lower() == "true"


def _offload(text: str) -> OffloadRatios:
    """Ratios of a text such as ``"optimizer=1 activations=0.5"``."""
    ratios: dict[str, float] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        try:
            ratios[name] = float(value)
            OffloadRatios(**{name: 0.0})
        except (TypeError, ValueError):
            raise ValueError(
                f"offload {part!r}: write one of {', '.join(OFFLOAD_KINDS)} and a ratio, for example optimizer=1"
            ) from None
    return OffloadRatios(**ratios)


def _point(
    open_one: "Callable[[int | None, int], Estimator]", base: Mapping[str, Any], values: tuple[tuple[str, str], ...]
) -> "SweepPoint":
    """One combination of a sweep, or why there is none."""
    from lightning_mist.estimate import SweepPoint, estimate_plan

    chosen = {**base, **dict(values)}
    length = None if chosen["seq_len"] is None else _number("seq_len", chosen["seq_len"])
    try:
        estimator = open_one(length, _number("global_batch_size", chosen["global_batch_size"]))
        found = estimate_plan(
            estimator,
            _plan(estimator.spec.num_layers, estimator.cluster, chosen),
            advise=False,
        )
    except (PlanError, ValueError) as error:
        return SweepPoint(values=values, error=str(error))
    return SweepPoint(values=values, estimate=found)


def _print_estimate(estimator: "Estimator", plan: Plan, as_json: bool, picture: str | None) -> None:
    from lightning_mist.estimate import estimate_plan, estimate_to_json, render_estimate

    found = estimate_plan(estimator, plan)
    if as_json:
        answer(estimate_to_json(found), end="")
    else:
        display(render_estimate, found)
    if found.verdict != "fits" and not estimator.spec.splits and _could_share(estimator):
        say("devices that share layers were not looked at, which takes a longer trace: try --tensor-parallel-degree 2")
    if picture is not None:
        from lightning_mist.estimate import draw_memory

        draw_memory(found, estimator.timelines(plan), picture)
        say(f"picture written to {picture}")


def _could_share(estimator: "Estimator") -> bool:
    """Whether tensor parallelism might help: nothing rules it out, and a node has several devices."""
    return estimator.cluster.devices_per_node > 1 and not estimator.spec.module_map.excludes("tensor")


def _check_picture(path: str | None, sweep: str | None) -> None:
    """Refuse a picture that could not be drawn, before anything takes time."""
    if path is None:
        return
    if sweep is not None:
        raise ValueError(f"--picture {path} with --sweep: one picture shows one plan; leave one or the other out")
    check_drawn("picture", path)


def _print_sweep(points: list["SweepPoint"], as_json: bool) -> None:
    from lightning_mist.estimate import render_sweep, sweep_to_json

    if as_json:
        answer(sweep_to_json(points), end="")
    else:
        display(render_sweep, points)
