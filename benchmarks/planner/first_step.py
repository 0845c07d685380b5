"""How long a program takes until its first step has ended, and how much it prints until then, beside DDP.

OMP_NUM_THREADS=1 python -m benchmarks.planner.first_step

Two CPU processes. Each program runs under DDP, under ``strategy="mist"`` on a machine that was never measured, on one
that was, and once more: then its plan is known.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.record import ROOT, Sample, make_record, write_record

FIRST = "first step has ended"
"""What each program prints then."""

_REPORT = f"""
import lightning.pytorch as pl, sys

class First(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 1 and trainer.is_global_zero:
            print("{FIRST}", flush=True)
        # The run is planned as the long one that it would be.
        trainer.should_stop = trainer.global_step == 3
"""

_SMALL = (
    _REPORT
    + """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = (28 * 28, 128, 64, 10)
        layers = [part for a, b in zip(sizes, sizes[1:]) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        self.net = torch.nn.Sequential(*layers[:-1])

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

pl.seed_everything(0)
rows = TensorDataset(torch.randn(512, 28 * 28), torch.randint(0, 10, (512,)))
trainer = pl.Trainer(
    strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=2000, callbacks=[First()], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Small(), DataLoader(rows, batch_size=32))
"""
)

_EXAMPLE = (
    _REPORT
    + f"""
sys.path.insert(0, {str(ROOT / "examples" / "byte_gpt")!r})
from data import StandardLibrary
from model import ByteGPT

pl.seed_everything(0)
trainer = pl.Trainer(
    strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=200, callbacks=[First()], logger=False,
    limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(ByteGPT(layers=8, width=128, length=128, dropout=0.0), StandardLibrary(length=128, batch_size=16))
"""
)

PROGRAMS = {"small classifier": _SMALL, "byte-gpt": _EXAMPLE}


def run_once(program: Path, strategy: str, home: Path) -> tuple[float, int]:
    """Seconds until the first step has ended, and lines printed before.

    Raises:
        RuntimeError: If the program fails.
    """
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started, seconds, lines = perf_counter(), None, 0
    with subprocess.Popen(
        [sys.executable, str(program), strategy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=home,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if seconds is None and FIRST in line:
                seconds = perf_counter() - started
            elif seconds is None and line.strip():
                lines += 1
    if process.returncode or seconds is None:
        raise RuntimeError(f"{program.name} {strategy}: {''.join(printed)[-3000:]}")
    return seconds, lines


def samples_of(name: str, text: str, repeats: int) -> list[Sample]:
    """Medians over several rounds of one program."""
    found: dict[str, list[tuple[float, int]]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            program = home / "program.py"
            program.write_text(textwrap.dedent(text))
            for strategy, machine in (("ddp", ""), ("mist", "new"), ("mist", "known"), ("mist", "known, planned")):
                if machine == "known":
                    for plan in home.glob(".cache/lightning-mist/plans/*"):
                        plan.unlink()
                found.setdefault(f"{strategy} {machine}".strip(), []).append(run_once(program, strategy, home))
    plain = median(seconds for seconds, _ in found["ddp"])
    return [
        {
            "program": name,
            "strategy": strategy.partition(" ")[0],
            "machine": strategy.partition(" ")[2],
            "first_step_seconds": median(seconds for seconds, _ in runs),
            "beyond_ddp_seconds": median(seconds for seconds, _ in runs) - plain,
            "lines": round(median(lines for _, lines in runs)),
        }
        for strategy, runs in found.items()
    ]


def main() -> None:
    """Run the programs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for name, text in PROGRAMS.items():
        samples += samples_of(name, text, options.repeats)
        print(*samples[-4:], sep="\n", flush=True)
    notes = (
        f"Medians of {options.repeats} rounds, two processes of one thread each. Seconds from the program's start, "
        "imports and the launch of the second process included; lines that both processes print before the step ends."
    )
    if not options.dry_run:
        print(write_record(make_record("first-step", samples, notes=notes)))


if __name__ == "__main__":
    main()
