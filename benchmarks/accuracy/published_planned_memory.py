"""Published peaks of memory, as the planner estimates them: of its plan for a run, before anything is run again.

:mod:`benchmarks.accuracy.published_memory` runs others' programs again, allocation by allocation. What a user is told
comes from a trace of the network and a plan instead; that is what is compared here, of the same rows.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.accuracy.published_programs import library_of
from benchmarks.accuracy.published_replay import replay
from benchmarks.accuracy.published_rows import Row, UnpredictableError, catalog_name, known, mist_stage, plan_of
from benchmarks.accuracy.published_run_rows import PublishedRun, read_runs
from benchmarks.accuracy.published_time import run_of, traced
from benchmarks.record import Sample
from lightning_mist.errors import MistError
from lightning_mist.estimate import Estimator, MemoryEstimate, estimate_plan
from lightning_mist.hardware import parse_cluster, single

_LLAMAS = ("llama", "mistral")
"""Families whose blocks :class:`~benchmarks.accuracy.published_decoder.Decoder` has."""

_BUFFERS = "buffers of an offloaded optimizer that are there while it updates, not all the time"

_ONE_TENSOR = (
    "Megatron's shared loss turns scores into probabilities and these into the gradient within one float32 tensor, "
    "where this runtime's makes three"
)
"""Why runs of Megatron with tensor parallelism are not compared."""

_RESERVED = (
    "what Mist's updates allocate, on streams made for the occasion whose segments no other stream can use, and in "
    "float32 layer by layer: this runtime updates on the stream that computes"
)
"""Why bytes that Mist's allocator held are not a plan's."""

_GPTS = {
    # Transformers before 4.49, see :mod:`benchmarks.accuracy.published_models`.
    "gpt_bigcode": {"bias": True, "dropout": 0.1, "keeps_cache": True},
}

_LITGPT = {
    # As :mod:`benchmarks.accuracy.published_litgpt` has it, of the same source.
    "norm": "rms by operators",
    "positions": "rotary in float32",
    "keeps_scores": True,
}
"""What of LitGPT's model keeps more than torch's own modules do."""


def planned(row: Row, plans: Mapping[str, Row]) -> tuple[MemoryEstimate, int, tuple[str, ...]]:
    """What a row's run needs by the planner's estimate, the stage that the row is of, and what was priced as others.

    Raises:
        UnpredictableError: If it cannot be said as a plan.
        MistError: If the project refuses it.
    """
    if "arch" in row:
        return _of_sizes(row)
    case = plan_of(row, plans)
    if case.get("runtime") == "megatron":
        return _of_megatron(row)
    return _of_mist(row, case)


def _of_mist(row: Row, case: Row) -> tuple[MemoryEstimate, int, tuple[str, ...]]:
    run = run_of(str(row["id"]), case)
    dims, _ = mist_stage(row, case)
    spec = traced(dims, single_row=run.plan.stages[0].microbatch_size == 1)
    gpu = catalog_name(row.get("gpu") or "L4-24GB")
    cluster = single(parse_cluster(f"1x{run.plan.world_size}x{gpu}"), "a published run")
    estimate = estimate_plan(Estimator(spec, cluster, cluster.device.memory_bytes), run.plan, advise=False)
    index = int(row.get("stage", 0))
    others = ("flat parameters", _BUFFERS) if estimate.stages[index].term("offload_bytes") else ("flat parameters",)
    return estimate, index, others


def _of_megatron(row: Row) -> tuple[MemoryEstimate, int, tuple[str, ...]]:
    name = str(row["id"])
    runs, sizes = read_runs()
    gpu = str(row["gpu"]).removeprefix("dgx_")
    for run in runs:
        split = f"_tp{run.tensor}_pp{run.pipeline}_"
        if run.id.startswith("megatron-") and run.id.endswith(gpu) and split in name:
            if run.tensor > 1:
                raise UnpredictableError(_ONE_TENSOR)
            found = replay(run, sizes[run.model])
            return found.estimate, len(found.estimate.stages) - 1, found.stand_ins
    raise UnpredictableError("experts: no plan deals out tokens to them")


def _of_sizes(row: Row) -> tuple[MemoryEstimate, int, tuple[str, ...]]:
    arch, parallel = row["arch"], dict(row.get("parallel") or {})
    family = known(str(arch["family"]), (*_LLAMAS, *_GPTS), "family")
    sizes: dict[str, Any] = {
        "hidden": arch["h"],
        "ffn": arch["ffn"],
        "layers": arch["layers"],
        "heads": arch["heads"],
        "vocabulary": arch["vocab"],
        "tied": bool(arch.get("tied")),
        "copies_scores": library_of(row) == "transformers",
        **_GPTS.get(family, {}),
    }
    if arch.get("kv") not in (None, arch["heads"]):
        sizes["key_value_heads"] = arch["kv"]
    if family in _LLAMAS:
        sizes |= {"feed_forward": "swiglu", "norm": "rmsnorm", "positions": "rotary", "float_loss": True}
    if library_of(row) == "litgpt":
        sizes |= _LITGPT
    world = int(row.get("world") or 1)
    recompute = str(row.get("checkpoint") or "none")
    run = PublishedRun(
        id=str(row["id"]),
        source=str(row.get("source", "")),
        model=family,
        gpu=catalog_name(row.get("gpu")),
        nodes=1,
        devices=world,
        length=int(row["seq"]),
        micro=int(row["micro_batch"]),
        batch=int(row["micro_batch"]) * world * int(row.get("grad_accum") or 1),
        precision=known({"pure bf16": "bf16"}.get(str(row["precision"]), row["precision"]), ("bf16",), "precision"),
        recompute="full" if recompute.startswith("full") else known(recompute, ("none",), "checkpoint"),
        stack="eager",
        zero=3 if any(name.startswith("fsdp") for name in parallel) else 0,
        seconds=None,
    )
    return replay(run, sizes).estimate, 0, ()


def planned_columns(row: Row, plans: Mapping[str, Row]) -> Sample:
    """The columns of a record about the planner's estimate of a row."""
    try:
        estimate, stage, others = planned(row, plans)
    except (MistError, UnpredictableError) as error:
        return {"not_planned": str(error)}
    found = estimate.stages[stage]
    columns: Sample = {"planned_verdict": estimate.verdict, "planned_as": "; ".join(others)}
    if "peak_allocated_bytes" in row["measured"]:
        value = found.allocated.p50 - (found.term("offload_bytes") if _BUFFERS in others else 0)
        columns |= {"planned_allocated_bytes": value}
        columns["planned_allocated_error"] = value / int(row["measured"]["peak_allocated_bytes"]) - 1
    if "reserved_bytes" in row["measured"]:
        columns["reserved_not_planned"] = _RESERVED
    return columns
