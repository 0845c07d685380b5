"""Seconds from a module to its costs: cuts, and a trace for a CUDA device, in a process of their own.

python -m benchmarks.planner.tracing
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import Sample, make_record, write_record
from lightning_mist.model import ModelSpec, run_apart, trace_model
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow

SIZES = {"hidden": 4096, "ffn": 14336, "heads": 32, "key_value_heads": 8, "vocabulary": 128256}
"""Llama 3 8B (arXiv:2407.21783, table 3)."""

ROWS, LENGTH, PRECISION = 1, 2048, "bf16-true"


class HuggingFace(nn.Module):
    """A ``training_step`` around the Llama of transformers."""

    def __init__(self, layers: int, sizes: dict[str, int]) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=sizes["vocabulary"],
                hidden_size=sizes["hidden"],
                intermediate_size=sizes["ffn"],
                num_hidden_layers=layers,
                num_attention_heads=sizes["heads"],
                num_key_value_heads=sizes["key_value_heads"],
                max_position_embeddings=LENGTH,
                use_cache=False,
                pad_token_id=None,
            )
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[1]).loss
        return loss


def plain(layers: int, sizes: dict[str, int]) -> nn.Module:
    """The same network of torch's own modules."""
    shape = LanguageModelShape(layers=layers, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=1.0, **sizes)
    return LanguageModel(shape, LENGTH)


MODELS: dict[str, Callable[[int, dict[str, int]], nn.Module]] = {"torch": plain, "transformers": HuggingFace}


def trace(module: nn.Module) -> tuple[ModelSpec, float]:
    """The costs of a module, and the processor's seconds that finding them took."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    started = process_time()
    spec = trace_model(
        module,
        (tokens, tokens.clone()),
        optimizer=torch.optim.AdamW,
        precision=PRECISION,
        device_kind="cuda",
    )
    return spec, process_time() - started


def measure(name: str, layers: int, sizes: dict[str, int] = SIZES) -> Sample:
    """Trace once, with a new process."""
    others = os.getloadavg()[0]
    module = hollow(partial(MODELS[name], layers, sizes), dtype=torch.bfloat16).train()
    started = perf_counter()
    spec, processor_seconds = run_apart(trace, module)
    seconds = perf_counter() - started
    assert spec.num_layers == layers
    return {
        "model": name,
        "layers": layers,
        "parameters": sum(item.numel for item in spec.parameters),
        "trace_seconds": seconds,
        "processor_seconds": processor_seconds,
        "load_average": others,
    }


def main(arguments: list[str] | None = None) -> None:
    """Trace every model at every depth a few times and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 80])
    options = parser.parse_args(arguments)
    samples: list[dict[str, Any]] = []
    for name in MODELS:
        for layers in options.layers:
            runs = [measure(name, layers) for _ in range(options.repeats)]
            sample = dict(runs[0])
            for key in ("trace_seconds", "processor_seconds", "load_average"):
                sample[key] = statistics.median(float(run[key] or 0.0) for run in runs)
            samples.append(sample)
            print(sample, flush=True)
    notes = (
        f"Layers of Llama 3 8B, {ROWS} row of {LENGTH} tokens, {PRECISION}, AdamW, for a CUDA device; medians of "
        f"{options.repeats} runs. trace_seconds is wall time with the process; processor_seconds is what it computed; "
        "load_average is how many processes wanted a processor in the minute before."
    )
    print(write_record(make_record("tracing", samples, notes=notes)))


if __name__ == "__main__":
    main()
