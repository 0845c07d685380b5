"""Published measurements and what is known of the programs that were measured.

A row of a points file says what was measured, and either states the run (``arch``, ``parallel``, ``optimizer``, ...) or
refers to a plan of a plans file by ``ref``. What is not known, or not understood here, is an
:class:`UnpredictableError` that says what and why: a row is never guessed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.published_mist import MistStage, Ratios
from benchmarks.accuracy.published_mist_model import MistDims
from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.devices import find_device

DATA = Path(__file__).parent / "data"
GIB = 1 << 30

Row = Mapping[str, Any]


class UnpredictableError(ValueError):
    """Why a row has no prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run is predicted to take.

    Attributes:
        allocated, active, reserved: Peaks of torch's statistics; None where they are not predicted.
        after_step: Allocated after a step, where it was asked for.
        how: Which program was run again.
    """

    allocated: int
    active: int | None = None
    reserved: int | None = None
    after_step: int | None = None
    how: str


def read_points(path: Path) -> list[Row]:
    """The rows of a points file: ``{"points": [...]}`` or a list.

    Raises:
        ValueError: If it is neither, or a row has no id.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.get("points") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
        raise ValueError(f'{path}: expected {{"points": [...]}} or a list, every row with an id')
    return rows


def read_plans(paths: Iterable[Path]) -> dict[str, Row]:
    """Plans by name, from files with ``{"cases": [...]}`` (Mist) or ``{"rows": {...}}`` (Megatron).

    Raises:
        ValueError: If a file is neither.
    """
    plans: dict[str, Row] = {}
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content.get("cases"), list):
            plans.update({case["id"]: case for case in content["cases"]})
        elif isinstance(content.get("rows"), dict):
            shared = {key: value for key, value in content.items() if key != "rows"}
            plans.update({name: {**shared, **row} for name, row in content["rows"].items()})
        else:
            raise ValueError(f'{path}: expected {{"cases": [...]}} or {{"rows": {{...}}}}')
    return plans


def plan_of(row: Row, plans: Mapping[str, Row]) -> Row:
    """The plan that a row refers to.

    Raises:
        UnpredictableError: If there is none.
    """
    name = str(row.get("ref", "")).partition(":")[2]
    found = [plan for key, plan in plans.items() if name and (key == name or key.endswith(f"/{name}"))]
    if not found:
        found = [plan for key, plan in plans.items() if f"/{key}_" in name or f"/{key}/" in name]
    if not found:
        raise UnpredictableError(f"no plan named {name!r} in the plans files: how it was run is not known")
    return found[0]


def known(value: Any, choices: Sequence[Any], what: str) -> Any:
    """A value that is one of those that are understood.

    Raises:
        UnpredictableError: If it is not.
    """
    if value not in choices:
        raise UnpredictableError(f"{what} = {value!r}; understood are {', '.join(map(repr, choices))}")
    return value


def mist_stage(row: Row, case: Row) -> tuple[MistDims, MistStage]:
    """A stage of a plan of Mist's, from its configuration.

    Raises:
        UnpredictableError: If the model or the plan has something that the program run here does not.
    """
    config, plan = case["model"], case["plan"]
    stages = plan["stages"]
    index = int(row.get("stage", 0))
    if not 0 <= index < len(stages):
        raise UnpredictableError(f"stage = {index}: the plan has {len(stages)} stages")
    stage = stages[index]
    for name in ("bias", "qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "tie_word_embeddings"):
        known(config.get(name, False), (False,), name)
    for name in ("hidden_dropout", "attention_dropout"):
        known(float(config.get(name, 0.0)), (0.0,), name)
    known(config.get("prenorm", True), (True,), "prenorm")
    known(case.get("fp32_residual_connection", False), (False,), "fp32_residual_connection")
    gated = known(config["mlp_type"], ("mlp", "gated_mlp"), "mlp_type") == "gated_mlp"
    known(config["activation_function"], ("swiglu", "silu") if gated else _GELUS, "activation_function")
    heads = int(config["num_attention_heads"])
    dims = MistDims(
        hidden=int(config["hidden_size"]),
        ffn=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_heads_kv") or heads),
        vocabulary=int(case.get("vocab_size") or config["vocab_size"]),
        length=int(case["seq_len"]),
        is_gated=gated,
        is_parallel=bool(config.get("parallel_block", False)),
        is_rms=known(config["normalization"].lower(), ("layernorm", "rmsnorm"), "normalization") == "rmsnorm",
        uses_flash=bool(config["use_flash_attn"]),
        tensor_parallel=int(stage["tp"]),
    )
    if not dims.uses_flash and dims.kv_heads != heads:
        raise UnpredictableError(f"num_heads_kv = {dims.kv_heads} without flash attention is not understood")
    # A microbatch more than are in flight, and one to begin with: the rest repeats them.
    in_flight = len(stages) - index
    return dims, MistStage(
        index=index,
        stages=len(stages),
        layers=int(stage["num_layers"]),
        checkpointed=int(stage["ckpt_layers"]),
        microbatch=int(stage["micro_batch_per_dp_rank"]),
        microbatches=min(int(plan["grad_accumulation_steps"]), in_flight + 2),
        data_parallel=int(stage["dp"]),
        zero=_zero_stage(stage),
        ratios=Ratios(
            weights=float(stage["weight_offload"]),
            gradients=float(stage["grad_offload"]),
            optimizer=float(stage["optim_offload"]),
            activations=float(stage["activation_offload"]),
        ),
        device_bytes=int(float(case["memory_capacity_gb_config"]) * GIB),
    )


def _zero_stage(stage: Row) -> int:
    """Of the number itself, or of what is said to be sharded."""
    if "zero_stage" in stage:
        return int(known(int(stage["zero_stage"]), (1, 2, 3), "zero_stage"))
    flags = [int(bool(stage[f"{name}_sharded"])) for name in ("weights", "grads", "optim")]
    return int(known(sum(flags), (1, 2, 3), "number of sharded states"))


_GELUS = ("gelu", "gelu_fast", "gelu_approx", "gelu_pytorch_tanh")


def catalog_name(gpu: str | None) -> str:
    """The catalog's name of a row's device.

    Raises:
        UnpredictableError: If the catalog has no such device.
    """
    name = str(gpu or "").lower().removeprefix("dgx_").removesuffix("gb")
    for candidate in (name, name.rpartition("-")[0]):
        try:
            return find_device(candidate).name
        except (ProfileError, ValueError):
            continue
    raise UnpredictableError(f"gpu = {gpu!r} is not in the catalog of devices")
