"""One training run of :mod:`benchmarks.throughput.offload`: a model from a configuration, under a cap, by one strategy.

Whatever happens is written: how the run ended, and what was measured until then.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader
from transformers.initialization import no_init_weights

from benchmarks.plans import data_parallel
from benchmarks.workload import Times
from lightning_mist import MistStrategy, Plan
from lightning_mist.errors import MistError

GIB = 1 << 30

STRATEGIES = ("mist", "recomputed", "fsdp", "deepspeed")
"""Ours by the plan that it chooses; ours with every layer recomputed and nothing moved; and others that move."""


def gpt2(hidden: int, layers: int, heads: int, vocabulary: int, length: int) -> Any:
    """A GPT-2 without dropout: every strategy computes the same."""
    return transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )


def llama(hidden: int, layers: int, heads: int, vocabulary: int, length: int, ffn: int) -> Any:
    """A LLaMA."""
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )


SIZES: dict[str, Callable[[int], Any]] = {
    "1.3b": lambda length: gpt2(2048, 24, 16, 50257, length),
    "2.7b": lambda length: gpt2(2560, 32, 32, 50257, length),
    "7b": lambda length: llama(4096, 32, 32, 32000, length, 11008),
    "tiny": lambda length: gpt2(32, 4, 2, 97, length),
    "tiny-llama": lambda length: llama(32, 4, 2, 97, length, 64),
}
"""Configurations by name: GPT-3 1.3B (with 16 heads for its 24) and 2.7B (Brown et al., 2020, table 2.1), and LLaMA 7B
(Touvron et al., 2023, table 2)."""


class LanguageModel(pl.LightningModule):
    """Random weights, next-token loss, AdamW.

    Args:
        configuration: Of the model.
        strategy: One of :data:`STRATEGIES`.
    """

    def __init__(self, configuration: Any, strategy: str) -> None:
        super().__init__()
        self._strategy = strategy
        # Its own initialization draws most values twice, on one core: minutes for billions of them.
        with no_init_weights():
            self.network = transformers.AutoModelForCausalLM.from_config(configuration)
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if parameter.dim() > 1:
                    parameter.uniform_(-0.03, 0.03)
                else:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        if strategy in ("fsdp", "deepspeed"):
            self.network.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._strategy == "deepspeed":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(self.parameters(), lr=1e-4)
            return optimizer
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def strategy_of(options: argparse.Namespace, layers: int) -> Any:
    """What trains."""
    common = {"self_check": False, "plan_path": str(options.out.with_suffix(".plan"))}
    if options.strategy == "mist":
        limit = None if options.cap is None else int(options.cap * GIB)
        return MistStrategy(memory_limit=limit, **common)
    if options.strategy == "recomputed":
        return MistStrategy(plan=data_parallel(layers, 1, options.rows, checkpointed=layers), **common)
    if options.strategy == "fsdp":
        from lightning.pytorch.strategies import FSDPStrategy
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return FSDPStrategy(cpu_offload=True, auto_wrap_policy={GPT2Block, LlamaDecoderLayer})
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return DeepSpeedStrategy(
        stage=2,
        offload_optimizer=True,
        pin_memory=True,
        logging_batch_size_per_gpu=options.rows,
    )


def how_it_ended(error: BaseException | None) -> str:
    """In words for a table."""
    if error is None:
        return "trained"
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    if any(isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(e).lower() for e in chain):
        return "out of memory"
    return "refused" if isinstance(error, MistError) else "failed"


def words_of(plan: Plan | None) -> str | None:
    """What of a plan of one stage matters here."""
    if plan is None:
        return None
    stage = plan.stages[0]
    moved = {
        kind: ratio
        for kind in ("parameters", "gradients", "optimizer", "activations")
        if (ratio := getattr(stage.offload, kind))
    }
    words = ", ".join(f"{ratio:.0%} of {kind}" for kind, ratio in moved.items()) or "nothing"
    return f"{plan.num_microbatches} microbatches, {stage.checkpointing.layers} layers recomputed, {words} moved"


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and tell what was measured."""
    configuration = SIZES[options.size](options.length)
    strategy, times = strategy_of(options, configuration.num_hidden_layers), Times()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    if isinstance(strategy, MistStrategy):
        with trainer.init_module(empty_init=True):
            module = LanguageModel(configuration, options.strategy)
    else:
        # In host memory, in the precision that it is trained in.
        torch.set_default_dtype(torch.bfloat16 if options.precision == "bf16-true" else torch.float32)
        module = LanguageModel(configuration, options.strategy)
        torch.set_default_dtype(torch.float32)
    tokens = torch.randint(
        configuration.vocab_size,
        (options.rows * options.steps, options.length),
        generator=torch.Generator().manual_seed(1),
    )
    parameters = sum(parameter.numel() for parameter in module.parameters())
    trainer.fit(module, DataLoader(tokens, batch_size=options.rows))
    seconds = statistics.median(times.seconds())
    return {
        "parameters": parameters,
        "step_seconds": seconds,
        "tokens_per_second": options.rows * options.length / seconds,
        "first_loss": times.losses[0],
        "last_loss": times.losses[-1],
        "plan": words_of(getattr(strategy, "plan", None)),
    }


def attempt(options: argparse.Namespace) -> dict[str, Any]:
    """Train under the cap, if what trains is there; how that ended."""
    if options.strategy == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return {"ended": "not installed", "error": "deepspeed cannot be imported"}
    if options.device == "cuda" and options.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        if total < options.cap * GIB:
            return {"ended": "not tried", "error": f"the card has {total / GIB:.1f} GiB"}
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total, 0)
    found: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        found = train(options)
    except Exception as caught:
        error = caught
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    if options.device == "cuda":
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated(0)
    # The kernel counts in KiB (getrusage(2)).
    found["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "ended": how_it_ended(error)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a run and its benchmark are both told."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", default=None, help="Lightning's; bf16-true where the device has it")


def main() -> None:
    """Try, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--cap", type=float, help="GiB of the device")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)
    options.out.write_text(json.dumps(attempt(options)))


if __name__ == "__main__":
    main()
