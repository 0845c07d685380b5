"""Train a GPT by ``strategy="mist"`` on two CPU processes whose memory plain DDP exceeds, and beside it by DDP.

    python examples/byte_gpt/demo.py

The model and the data are those of ``train.py``. The limit holds for the plan alone: DDP, which has none, shows what
the losses must be. Both train in double precision, where rounding hides no difference.
"""

import logging
import os
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import lightning.pytorch as pl
from data import StandardLibrary
from lightning.pytorch.callbacks import Callback
from model import ByteGPT

from lightning_mist import MistStrategy, estimate_memory
from lightning_mist.cli import main as lightning_mist
from lightning_mist.units import format_bytes, format_seconds

LIMIT = "84MiB"
PROCESSES, STEPS, WINDOWS, LENGTH = 2, 20, 8, 128
OUT = Path("runs/demo")


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Take what ``training_step`` logged."""
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def make() -> tuple[ByteGPT, StandardLibrary]:
    """The same model and data each time."""
    pl.seed_everything(0, verbose=False)
    return ByteGPT(layers=12, width=160, length=LENGTH), StandardLibrary(length=LENGTH, batch_size=WINDOWS)


def losses(strategy: object) -> list[float]:
    """Train by a strategy."""
    kept = Losses()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=PROCESSES,
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[kept],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(*make())
    return kept.found


def say_what_ddp_needs() -> None:
    """Bytes of plain data parallelism, before anything runs."""
    model, data = make()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    need = estimate_memory(
        model.double(), batch, cluster=f"{PROCESSES}xCPU:{LIMIT}", precision="64-true", optimizer="AdamW", advise=False
    )
    state = sum(need.worst.term(f"{name}_bytes") for name in ("parameter", "gradient", "optimizer"))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"A GPT of {count / 1e6:.1f} million parameters, AdamW, {PROCESSES} processes with {WINDOWS} rows each.")
    print(
        f"Plain DDP needs {format_bytes(need.worst.device_total.p50)} in each process, {format_bytes(state)} of it ",
        end="",
    )
    print("for parameters, gradients and optimizer state.")
    print(f"Each process may use {LIMIT}. DDP {need.verdict}.\n", flush=True)


def main() -> None:
    """Say what DDP needs, train by the plan that is found under the limit, then by DDP without one, and compare."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if is_first:
        say_what_ddp_needs()
    plan, picture, page = (str(OUT / name) for name in ("plan.json", "step.svg", "plan.html"))
    strategy = MistStrategy(memory_limit=LIMIT, plan_path=plan, report_path=str(OUT / "report.json"))
    ours = losses(strategy)
    ddp = losses("ddp")
    if not is_first:
        return
    print("\nstep   loss by the plan   loss by DDP without a limit")
    for step in (*range(0, STEPS, 5), STEPS - 1):
        print(f"{step + 1:4d}   {ours[step]:16.6f}   {ddp[step]:27.6f}")
    print(f"Largest difference in {STEPS} steps: {max(abs(a - b) for a, b in zip(ours, ddp, strict=True)):.1e}\n")
    print(f"            {'predicted':>10}  {'measured':>10}")
    report = strategy.report
    print(f"step        {format_seconds(report.predicted_step_seconds):>10}  ", end="")
    print(f"{format_seconds(report.measured_step_seconds):>10}")
    for index, stage in enumerate(report.stages):
        predicted, measured = format_bytes(stage.predicted_bytes), format_bytes(stage.measured_bytes)
        print(f"stage {index}     {predicted:>10}  {measured:>10}")
    with redirect_stdout(StringIO()):
        lightning_mist(["show", plan, "--timeline", picture, "--html", page, "--memory-limit", LIMIT])
    print(f"\nThe step as a picture: {picture}\nAll of the plan in one page, for a browser: {page}")
    print(f"The plan: {plan} (lightning-mist show {plan})")


if __name__ == "__main__":
    main()
