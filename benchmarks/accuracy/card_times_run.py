"""One model on one card: what its steps were predicted to take by plans of several kinds, and what they took.

Started by :mod:`benchmarks.launch`. The first fit lets the strategy measure the card and the layers and choose a plan;
every prediction is made from that, before the plan it is for has run. Each run is a ``Trainer.fit`` of its own.
"""

import argparse
import gc
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.accuracy.step_times_run import CHOSEN
from benchmarks.plans import SEARCHED, data_parallel
from benchmarks.throughput.offload_run import LanguageModel, gpt2, llama
from benchmarks.workload import WARM_UP_STEPS, Times
from lightning_mist import MistStrategy
from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios, Plan

SIZES: dict[str, Callable[[int], Any]] = {
    "gpt2-large": lambda length: gpt2(1280, 36, 20, 50257, length),
    "llama-1.1b": lambda length: llama(2048, 22, 32, 32000, length, 5632),
    "tiny": lambda length: gpt2(32, 4, 2, 97, length),
}
"""Configurations by name: GPT-2 large (Radford et al., 2019, table 2), and TinyLlama with as many key heads."""


def plans_of(layers: int, rows: int) -> dict[str, Plan]:
    """Plans of every kind for one device, by name."""

    def moved(plan: Plan, **ratios: float) -> Plan:
        return replace(plan, stages=(replace(plan.stages[0], offload=OffloadRatios(**ratios)),))

    whole, recomputed = data_parallel(layers, 1, rows), data_parallel(layers, 1, rows, checkpointed=layers)
    return {
        "plain": whole,
        "G=2": data_parallel(layers, 1, rows, microbatches=2),
        "G=4": data_parallel(layers, 1, rows, microbatches=4),
        "half recomputed": data_parallel(layers, 1, rows, checkpointed=layers // 2),
        "all recomputed": recomputed,
        "optimizer state moved": moved(whole, optimizer=1.0),
        "half of optimizer state moved": moved(whole, optimizer=0.5),
        "half of activations moved": moved(whole, activations=0.5),
        "all recomputed, parameters and optimizer state moved": moved(recomputed, parameters=1.0, optimizer=1.0),
    }


def fit(options: argparse.Namespace, strategy: Any, steps: int) -> list[float]:
    """Train a new model; seconds of every step after those that warm up."""
    gc.collect()  # what the run before has left in reference cycles
    if options.device == "cuda":
        torch.cuda.empty_cache()
    configuration, times = SIZES[options.size](options.length), Times()
    with torch.device(options.device):
        module = LanguageModel(configuration, "mist")
    tokens = torch.randint(configuration.vocab_size, (options.rows * (WARM_UP_STEPS + steps), options.length))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        precision=options.precision,
        max_steps=WARM_UP_STEPS + steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(tokens, batch_size=options.rows))
    return times.seconds()


def predicted_plans(options: argparse.Namespace, directory: Path) -> dict[str, Plan]:
    """The plans with their predictions, the chosen one first."""
    strategy: Any = MistStrategy(
        search=SEARCHED, profile_directory=str(directory), self_check=False, correct_profile=False
    )
    fit(options, strategy, 1)
    basis = strategy._decision.basis
    assert basis is not None
    model = StageCostModel(basis.spec, basis.profile, basis.cluster)
    found = {CHOSEN: replace(strategy.plan, fingerprint=())}
    for label, plan in plans_of(SIZES[options.size](options.length).num_hidden_layers, options.rows).items():
        try:
            found[label] = replace(plan, predicted=predict_with(model, plan))
        except PlanError as error:
            print(f"no {label}: {error}", flush=True)
    return found


def measured(options: argparse.Namespace, label: str, plan: Plan, directory: Path) -> dict[str, Any]:
    """One row: a plan's prediction and what it took."""
    assert plan.predicted is not None
    found: dict[str, Any] = {
        "model": options.size,
        "plan": label,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "modelled_bytes": plan.predicted.stages[0].peak_bytes,
    }
    report = directory / "report.json"
    strategy: Any = MistStrategy(plan=plan, report_path=str(report), self_check=False, correct_profile=False)
    try:
        seconds = fit(options, strategy, options.steps)
    except Exception as error:
        # What one plan ends with is its row; the others are still to be tried.
        return {**found, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    stage = json.loads(report.read_text())["stages"][0]
    found["measured_step_seconds"] = statistics.median(seconds)
    found["time_error"] = found["predicted_step_seconds"] / found["measured_step_seconds"] - 1
    for figure in ("bytes", "reserved_bytes", "device_bytes"):
        found |= {f"{kind}_{figure}": stage.get(f"{kind}_{figure}") for kind in ("predicted", "measured")}
    for kind in ("predicted", "measured"):
        times = stage.get(f"{kind}_times") or {}
        found |= {f"{kind}_{name}": value for name, value in times.items() if isinstance(value, float)}
    return found


def main() -> None:
    """Predict, run, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for label, plan in predicted_plans(options, directory).items():
            rows.append(measured(options, label, plan, directory))
            print(rows[-1], flush=True)
            # After every plan: who is ended early has shown the others.
            options.out.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
