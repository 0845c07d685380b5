"""From what a row says of a training run to the program that is run again."""

import re
from typing import Any

import torch

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_litgpt import LitGPT
from benchmarks.accuracy.published_models import Arithmetic, BigCode, LlamaLike, Model, Shape
from benchmarks.accuracy.published_parallel import ParallelDecoder
from benchmarks.accuracy.published_rows import Prediction, Row, UnpredictableError, known
from benchmarks.accuracy.published_torchtune import TorchTune
from benchmarks.accuracy.published_training import STEPS, Trainer, Training
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings

_KEYS = frozenset(
    (
        *("id", "arch", "world", "micro_batch", "seq", "grad_accum", "checkpoint", "parallel", "precision"),
        *("optimizer", "attention", "measured", "gpu", "source", "metric", "note", "transformers"),
    )
)

_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "pure bf16": (torch.bfloat16, None),
    "bf16-true": (torch.bfloat16, None),
    "pure fp16": (torch.float16, None),
    "16-true": (torch.float16, None),
    "fp32": (torch.float32, None),
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16 mixed": (torch.float32, torch.bfloat16),
    "fp16-mixed": (torch.float32, torch.float16),
    "16-mixed": (torch.float32, torch.float16),
}

_LLAMAS = ("llama", "mistral", "granite", "qwen2", "gemma")
_BIGCODES = ("gpt_bigcode", "gpt2")
_PARALLELS = ("falcon", "gpt_neox", "pythia")

# docs of each model in transformers: dropout of embeddings and residuals in the default configuration.
_DROPOUT = 0.1


def predict_run(row: Row, workspace: int) -> Prediction:
    """A training run that the row describes.

    Args:
        row: The row.
        workspace: Bytes of a cuBLAS workspace on its device.

    Raises:
        UnpredictableError: If something in it is not understood.
    """
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise UnpredictableError(f"the row says {', '.join(unknown)}, which is not understood here")
    library = library_of(row)
    training = training_of(row, library)
    model = model_of(row, library)
    # One workspace for the thread of the forward, one for that of the backward.
    device = SimulatedDevice(AllocatorSettings(), workspaces=2 * workspace)
    with device:
        trainer = Trainer(device, model, training)
        for _ in range(STEPS):
            trainer.step()
        del trainer
    return Prediction(
        allocated=device.peak_allocated,
        active=device.peak_active,
        reserved=device.peak_reserved,
        how=f"{library}, {training.sharding if training.world > 1 else 'one device'}",
    )


def library_of(row: Row) -> str:
    """Whose code a row's model and loop are: that of its source, or Hugging Face's."""
    text = f"{row['id']} {row.get('source', '')}".lower()
    return next((name for name in ("litgpt", "torchtune") if name in text), "transformers")


def training_of(row: Row, library: str) -> Training:
    """How the run trains.

    Raises:
        UnpredictableError: If something in it is not understood.
    """
    world = int(row.get("world") or 1)
    parallel = dict(row.get("parallel") or {})
    for key in parallel:
        known(key, ("fsdp1", "fsdp", "ddp", "dp"), "parallel")
    degree = int(next(iter(parallel.values()), 1))
    if len(parallel) > 1 or degree != world:
        raise UnpredictableError(f"parallel = {parallel} on {world} devices is not understood")
    sharding = {"fsdp1": "fsdp1", "fsdp": "fsdp1", "ddp": "ddp", "dp": "ddp"}.get(next(iter(parallel), ""), "none")
    if world == 1:
        # The benchmark starts a single device without a launcher, and so without sharding.
        sharding = "none"
    recomputation = str(row.get("checkpoint") or "none").lower()
    known(re.split(r"\W", recomputation)[0], ("none", "full"), "checkpoint")
    text = str(row.get("optimizer") or "")
    if sharding != "none" and _IN_BACKWARD.search(text):
        raise UnpredictableError(f"optimizer = {text!r} on {world} devices is not understood here")
    kind, optimizer = optimizer_of(text)
    return Training(
        batch=int(row["micro_batch"]),
        length=int(row["seq"]),
        # Two batches: the first makes gradients, the second adds to them, and so does every further one.
        accumulation=min(int(row.get("grad_accum") or 1), 2),
        recomputes=recomputation != "none",
        is_reentrant=library == "transformers",
        optimizer=optimizer,
        kind=kind,
        is_paged="paged" in text.lower(),
        is_8bit=bool(_EIGHT_BITS.search(text)),
        steps_in_backward=bool(_IN_BACKWARD.search(text)),
        sharding=sharding,
        world=world,
        holds_logits=library == "litgpt",
        tensors_per_batch=3 if library == "transformers" else 2,
    )


_EIGHT_BITS = re.compile(r"8.?bit", re.IGNORECASE)
_IN_BACKWARD = re.compile(r"in.?(backward|bwd)", re.IGNORECASE)


def optimizer_of(text: str) -> tuple[str, str]:
    """Implementation and name.

    Raises:
        UnpredictableError: If it is another optimizer than AdamW, Adam and SGD.
    """
    lower = text.lower()
    if re.search(r"4.?bit|adafactor|lion|muon|galore|apollo|momentum|zero", lower):
        raise UnpredictableError(f"optimizer = {text!r} is not understood here")
    name = "sgd" if "sgd" in lower else "adamw" if "adam" in lower else None
    if name is None:
        raise UnpredictableError(f"optimizer = {text!r}; understood are AdamW, Adam and SGD")
    is_loop = re.search(r"for.?loop|foreach\s*=\s*false|single.?tensor|no foreach", lower)
    kind = "for-loop" if is_loop else "fused" if "fused" in lower else "foreach"
    return kind, name


def model_of(row: Row, library: str) -> Model:
    """The model, as the library that the row names computes it.

    Raises:
        UnpredictableError: If it is of another family.
    """
    arch = row["arch"]
    family = str(arch["family"]).lower()
    heads = int(arch["heads"])
    shape = Shape(
        hidden=int(arch["h"]),
        ffn=int(arch["ffn"]),
        layers=int(arch["layers"]),
        heads=heads,
        kv_heads=int(arch.get("kv") or heads),
        vocabulary=int(arch["vocab"]),
        head=int(arch.get("head_dim") or int(arch["h"]) // heads),
        is_tied=bool(arch.get("tied", False)),
        positions=int(arch.get("positions") or row["seq"]) if family in _BIGCODES else 0,
    )
    dtype, autocast = _PRECISIONS[known(str(row.get("precision", "")).lower(), tuple(_PRECISIONS), "precision")]
    default = "flash" if library != "transformers" or "fms" in str(row.get("source", "")) else "sdpa"
    attention = str(row.get("attention") or default).lower()
    attention = "flash" if "flash" in attention else known(attention, ("sdpa", "eager"), "attention")
    arithmetic = Arithmetic(dtype=dtype, autocast=autocast, attention=attention)
    if library == "torchtune":
        known(family, ("llama", "mistral", "qwen2"), "family")
        return TorchTune(shape=shape, arithmetic=arithmetic, has_qkv_bias=family == "qwen2")
    if library == "litgpt":
        return _litgpt(family, shape, arithmetic)
    return _transformers(row, family, shape, arithmetic)


def _litgpt(family: str, shape: Shape, arithmetic: Arithmetic) -> Model:
    """As LitGPT computes it."""
    known(family, ("llama", "mistral", "gemma", "gpt_neox", "pythia", "phi", "falcon"), "family")
    is_llama = family in ("llama", "mistral", "gemma")
    return LitGPT(
        shape=shape,
        arithmetic=arithmetic,
        is_llama=is_llama,
        is_gemma=family == "gemma",
        is_parallel=not is_llama,
        rotary={"gpt_neox": 0.25, "pythia": 0.25, "phi": 0.4}.get(family, 1.0),
        has_bias=family in ("gpt_neox", "pythia", "phi"),
    )


def _transformers(row: Row, family: str, shape: Shape, arithmetic: Arithmetic) -> Model:
    """As transformers computes it."""
    version = library_version(row)
    if family == "mixtral":
        raise UnpredictableError(
            "family = 'mixtral': how tokens are dealt out to experts decides sizes, and is not known"
        )
    casts, copies = version >= (4, 49), version < (4, 50)
    if known(family, _LLAMAS + _BIGCODES + _PARALLELS, "family") in _PARALLELS:
        is_falcon = family == "falcon"
        return ParallelDecoder(
            shape=shape,
            arithmetic=arithmetic,
            has_two_norms=not is_falcon,
            has_bias=not is_falcon,
            rotary=1.0 if is_falcon else 0.25,
            casts_logits=casts,
            copies_shifted=copies,
        )
    if family in _LLAMAS:
        return LlamaLike(
            shape=shape,
            arithmetic=arithmetic,
            has_qkv_bias=family == "qwen2",
            is_gemma=family == "gemma",
            copies_shifted=copies,
            # scenarios-liger.yaml gives every run of this table fast kernels.
            has_fast_kernels="a100_80gb_liger" in str(row.get("source", "")),
        )
    return BigCode(
        shape=shape,
        arithmetic=arithmetic,
        dropout=_DROPOUT,
        keeps_cache=family == "gpt_bigcode" and version < (4, 49),
        casts_logits=casts,
        copies_shifted=copies,
    )


def library_version(row: Row) -> tuple[int, int]:
    """Release of transformers: what the row says, at most or exactly, or that of the benchmark, 4.45."""
    texts: list[Any] = [row.get("transformers"), row.get("note"), row.get("optimizer"), row.get("source")]
    for text in texts:
        found = re.search(r"(?:transformers\s*[<>=]*\s*|^)(\d+)\.(\d+)", str(text or ""))
        if found:
            return int(found[1]), int(found[2])
    return 4, 45
