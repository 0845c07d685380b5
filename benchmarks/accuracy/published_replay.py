"""From a published training run to the plan, network and machine that the project prices.

What a run did that cannot be said, or whose price is not known, is in :data:`MISSING`; what is priced as something near
it is in :data:`STAND_INS`, and a prediction says which of these it used. When the project learns one of them, its line
goes from here and its meaning into :func:`plan_of`, :func:`spec_of` or
:mod:`benchmarks.accuracy.published_machines`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from benchmarks.accuracy.published_decoder import Decoder, DecoderSizes
from benchmarks.accuracy.published_kernel_choices import fused_keeps, overlapped_exchange, unfused_attention
from benchmarks.accuracy.published_machines import (
    AFTER,
    DETERMINISTIC,
    FLASH2,
    HELD,
    NVLINKS,
    WAITING,
    WIDE,
    machine_of,
    profile_of,
    without_chains,
)
from benchmarks.accuracy.published_recompute import recomputed
from benchmarks.accuracy.published_rows import UnpredictableError
from benchmarks.accuracy.published_run_rows import PublishedRun
from benchmarks.accuracy.published_sharing import evenly_shared, in_collectives
from lightning_mist.cost import StageCostModel, seconds_with
from lightning_mist.estimate import Estimator, MemoryEstimate, estimate_plan
from lightning_mist.hardware.catalog import STACKS, capability_of, catalog_profile
from lightning_mist.model import DeviceOperators, device_operators, trace_model
from lightning_mist.model.presets import KNOWN_OPTIMIZERS, LanguageModelShape, preset_spec
from lightning_mist.model.sources import parameter_dtype, precision_context
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.spec import ModelSpec, with_master_weights
from lightning_mist.plan import Checkpointing, CheckpointingKind, Plan, StageMesh, StagePlan, ZeroStage

UNFUSED, UNSHARED = "unfused attention", "no sequence parallelism"
BESIDE = "exchanges beside products"

PRICED = frozenset((WIDE, WAITING, AFTER, DETERMINISTIC, FLASH2, *NVLINKS, UNFUSED, UNSHARED, BESIDE))
"""Words that are priced as what they say."""

PRECISIONS: Mapping[str, tuple[str, bool, tuple[str, ...]]] = {
    "bf16": ("bf16-true", False, ()),
    "bf16 autocast": ("bf16-mixed", False, ()),
    "bf16, float32 masters": ("bf16-true", True, ()),
    "bf16, float32 masters, reductions in float32": ("bf16-true", True, (WIDE,)),
    "bf16, float32 masters, accumulation in float32": ("bf16-true", True, (WIDE,)),
}
"""Lightning's name of a run's precision, whether weights have masters, and what there is besides.

With masters gradients are added up in 32 bits, as in FSDP's sharded gradients and Megatron's buffers. Megatron reduces
what it has added up (``--accumulate-allreduce-grads-in-fp32``, which it turns on with ``--bf16``)."""

STAND_INS: Mapping[str, str] = {
    "fused norms, rotation and loss": "norms in one kernel each, others in many",
    "fused loss": "operators that keep and make as much",
    "loss compiled with the network": "operators that keep and make as much",
    "C++ engine": "fused kernels",
    "tables tied over stages": "a head of its own",
    "links before their repair": "links as they should be",
    "network not said": "the catalog's",
    "last product and loss in one kernel": "operators that keep and make as much",
    "cache kept while training": "one that this runtime would not be given",
    HELD: "an H100 with HBM3 and 700 W whose rates go with power and memory",
    "selective layer": "the first half of the layers recomputed, not every second one",
    "accumulation in 16 bits": "accumulation in 32",
    "sizes of a preset": "a network without biases whose head is not its table, heads rotated where gates are",
}
"""What is priced as something near it."""

FUSED_LOSSES: Mapping[str, str] = {
    "last product and loss in one kernel": "with its product",
    "fused norms, rotation and loss": "in place",
    "fused loss": "apart",
    "loss compiled with the network": "apart",
}
"""Which loss of :class:`~benchmarks.accuracy.published_decoder.DecoderSizes` programs have."""

KEEPS_MORE = frozenset(("C++ engine", "compiled", "fused"))
"""Stacks and words whose runs keep less than what is priced for them: eager operators, as this runtime runs them."""

ALIKE: Mapping[str, str] = {"fused norms, rotation and loss": "eager", "C++ engine": "fused"}
"""Stacks that are priced as another. Kernels for norms, rotation and loss leave gates and additions as they are."""

MISSING: Mapping[str, str] = {
    "float8": "products in float8 have no price",
    "hybrid sharding": "no plan shards within nodes and replicates between them",
    "asynchronous tensor parallelism": "no collective of tensor parallelism overlaps a product",
    "B200 with its power limited": "to how many watts is not said",
    "sharding over these devices is not known": "what its devices share out is not known",
}
"""What cannot be said, and why."""

_SIZES = ("numel", "bytes")

MOST_REPLAYED = 64
"""Devices up to which allocations are replayed one by one; beyond, their peaks are added up."""

TRACED_LENGTH = 2048
"""Tokens of the rows that networks are traced with."""

RECOMPUTED: Mapping[str, tuple[int, CheckpointingKind]] = {
    "none": (0, "full"),
    "full": (1, "full"),
    "selective layer": (2, "full"),
    "selective op": (1, "selective"),
    "attention": (0, "full"),
}
"""Of how many layers one is recomputed, or 0, and how; see :mod:`benchmarks.accuracy.published_recompute`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the project says of a published run.

    Attributes:
        seconds: Of a step, parameters shared out as the run's program does.
        own_seconds: The same, shared out as the project's runtime does.
        estimate: What the devices need.
        verdict: Whether it fits; ``"not certain"`` where what is priced keeps more than the run and does not fit, or
            less and fits.
        stand_ins: What was priced as something else.
    """

    seconds: float
    own_seconds: float
    estimate: MemoryEstimate
    verdict: str
    stand_ins: tuple[str, ...]


def needs_of(run: PublishedRun) -> tuple[str, ...]:
    """What a run needs beyond plain 16-bit eager training in whole layers, in words."""
    if run.precision not in PRECISIONS:
        raise UnpredictableError(f"precision = {run.precision!r}; understood are {', '.join(PRECISIONS)}")
    found = [*PRECISIONS[run.precision][2], *run.beside]
    found += [] if run.stack in STACKS else [run.stack]
    found += [] if run.recompute in RECOMPUTED and run.recompute not in STAND_INS else [run.recompute]
    if run.tensor > 1:
        found.append("sizes of a preset")
    if run.context > 1:
        found.append("context parallelism")
    return tuple(found)


def missing_of(run: PublishedRun) -> tuple[str, ...]:
    """Why a run cannot be said; nothing if it can."""
    return tuple(
        f"{need}: {MISSING.get(need, 'not understood')}"
        for need in needs_of(run)
        if need not in STAND_INS.keys() | PRICED
    )


def replay(run: PublishedRun, sizes: Mapping[str, Any]) -> Replay:
    """Seconds of a step and bytes of the devices of a run.

    Raises:
        UnpredictableError: If it cannot be said.
        MistError: If the project refuses the plan, the network or the machine.
    """
    missing = missing_of(run)
    if missing:
        raise UnpredictableError("; ".join(missing))
    cluster, plan = machine_of(run), plan_of(run, int(sizes["layers"]))
    spec = spec_of(run, tuple(sorted(sizes.items())))
    profile = profile_of(run, cluster, ALIKE.get(run.stack, run.stack), needs_of(run))
    if run.stack == "fused" and sizes.get("feed_forward") != "swiglu":
        profile = without_chains(profile, cluster)
    seconds = own = seconds_with(StageCostModel(spec, profile, cluster), plan)
    degree = plan.stages[0].data_parallel_degree
    if degree > 1 and run.zero:
        shared = StageCostModel(evenly_shared(spec, degree), in_collectives(profile), cluster)
        seconds = seconds_with(shared, plan)
    kind = Estimator(spec, cluster, cluster.device.memory_bytes)
    estimate = estimate_plan(kind, plan, advise=False, replay="worst" if run.world <= MOST_REPLAYED else "none")
    return Replay(
        seconds=seconds,
        own_seconds=own,
        estimate=estimate,
        verdict=verdict_of(run, estimate.verdict),
        stand_ins=tuple(word for word in needs_of(run) if word not in PRICED),
    )


def verdict_of(run: PublishedRun, verdict: str) -> str:
    """A verdict on what is priced for a run, as a verdict on the run."""
    words = {run.stack, *needs_of(run)}
    return "not certain" if verdict == "does not fit" and words & KEEPS_MORE else verdict


def plan_of(run: PublishedRun, layers: int) -> Plan:
    """The plan that the run followed: equal stages, tensor-parallel ranks neighbours, then data-parallel ones."""
    groups, parts = run.pipeline, run.pipeline * run.chunks
    size, per_stage = divmod(layers, parts)
    ranks, rest = divmod(run.world, groups * run.tensor * run.context)
    if per_stage or rest:
        raise UnpredictableError(f"{layers} layers in {parts} parts on {run.world} devices: not in equal stages")
    every, kind = RECOMPUTED[run.recompute]
    stages = []
    for index in range(parts):
        first = index % groups * (run.world // groups)
        mesh = StageMesh(
            devices=tuple(range(first, first + run.world // groups)),
            data_parallel_degree=ranks,
            tensor_parallel_degree=run.tensor,
            context_parallel_degree=run.context,
            sequence_parallel=run.tensor > 1 and UNSHARED not in run.beside,
        )
        stages.append(
            StagePlan(
                layers=(index * size, (index + 1) * size),
                mesh=mesh,
                microbatch_size=run.micro,
                zero_stage=ZeroStage(run.zero) if ranks > 1 else ZeroStage.NONE,
                checkpointing=Checkpointing(layers=-(-size // every) if every else 0, kind=kind),
            )
        )
    return Plan(
        global_batch_size=run.batch,
        num_microbatches=max(1, run.batch // (run.micro * ranks)),
        stages=tuple(stages),
        schedule="interleaved-1f1b" if run.chunks > 1 else "1f1b",
    )


def spec_of(run: PublishedRun, sizes: tuple[tuple[str, Any], ...]) -> ModelSpec:
    """What the network costs in the run's precision: traced, or a preset of its sizes where layers are split."""
    precision, has_masters, _ = PRECISIONS[run.precision]
    if run.tensor > 1:
        spec = _preset(run, sizes, precision)
    else:
        # Stacks with kernels of their own had fused norms before torch had.
        version = run.torch or None if run.stack in ("eager", "flash2") else None
        operators = device_operators("cuda", version, capability=capability_of(run.gpu))
        losses = [how for word, how in FUSED_LOSSES.items() if word in (*run.beside, run.stack)]
        traced = (*sizes, ("fused_loss", losses[0])) if losses else sizes
        traced = (*traced, ("keeps_cache", True)) if "cache kept while training" in run.beside else traced
        spec = at_length(_traced(traced, precision, operators), run.length)
    if BESIDE in run.beside:
        shared = catalog_profile(machine_of(run)).interference
        spec = overlapped_exchange(spec, shared.compute_network if shared else 0.0)
    if run.stack == "fused":
        spec = fused_keeps(spec, dict(sizes))
    spec = recomputed(spec, run.recompute, dict(sizes))
    if UNFUSED in run.beside:
        spec = unfused_attention(spec, dict(sizes))
    return with_master_weights(spec) if has_masters else spec


def at_length(spec: ModelSpec, length: int) -> ModelSpec:
    """A traced network for rows of another length: expressions are in it, and learned positions are as many."""
    assert spec.sequence_length is not None
    grown = {
        item.name: replace(item, **{name: getattr(item, name) * length // spec.sequence_length for name in _SIZES})
        for item in spec.parameters
        if item.name == "positions.weight"
    }
    parameters = tuple(grown.get(item.name, item) for item in spec.parameters)
    return replace(spec, parameters=parameters, sequence_length=length)


@cache
def _traced(sizes: tuple[tuple[str, Any], ...], precision: str, operators: DeviceOperators) -> ModelSpec:
    found = DecoderSizes(**dict(sizes))
    module = hollow(lambda: Decoder(found, TRACED_LENGTH), dtype=parameter_dtype(precision))
    context = precision_context(precision)

    def call(batch: Any) -> Any:
        with context():
            return module.training_step(batch, 0)  # type: ignore[operator]

    tokens = torch.zeros(2, TRACED_LENGTH, dtype=torch.long)
    batch = (tokens, tokens.clone())
    return trace_model(
        module, batch, call=call, optimizer=torch.optim.AdamW, precision=precision, device_kind=operators
    )


def _preset(run: PublishedRun, sizes: tuple[tuple[str, Any], ...], precision: str) -> ModelSpec:
    given = dict(sizes)
    names = ("hidden", "ffn", "layers", "heads", "vocabulary", "key_value_heads", "feed_forward", "norm")
    if UNFUSED in run.beside:
        given["heads"] = _traced_heads(given["hidden"], given["heads"], run.tensor)
    shape = LanguageModelShape(
        **{name: given[name] for name in names if name in given},
        rotary_fraction=1.0 if given.get("feed_forward") == "swiglu" else 0.0,
    )
    spec = preset_spec(
        shape,
        name=run.model,
        precision=precision,
        rows=run.micro,
        length=run.length,
        degrees=(run.tensor,),
        optimizer=KNOWN_OPTIMIZERS["AdamW"],
        capability=capability_of(run.gpu),
    )
    if spec is None:
        raise UnpredictableError(
            f"{run.model}, {run.tensor} ways: no preset has such blocks, or heads of {shape.head_width}"
        )
    return spec


def _traced_heads(hidden: int, heads: int, degree: int) -> int:
    """The fewest heads, no fewer than there are, that fused attention takes: without it only their scores matter."""
    most = 192
    widths = (width for width in range(min(most, hidden // heads), 0, -8) if not hidden % (width * degree))
    return hidden // next(width for width in widths if not hidden // width % degree)
