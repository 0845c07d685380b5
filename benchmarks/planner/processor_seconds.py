"""Processor seconds of whole programs that train or evaluate a small model, beside DDP: what the strategy costs.

OMP_NUM_THREADS=1 python -m benchmarks.planner.processor_seconds

On one and on two CPU processes, on a machine that is known: a fit by a plan that was found before, and an evaluation,
which plans nothing. Programs run in pairs that alternate, since other work on a machine changes what a processor second
does; modules are compiled before the first pair. Each process says at its end what it took.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.record import ROOT, Sample, make_record, write_record

_PROGRAM = """
import atexit, os, sys, time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

strategy, devices, kind, folder = sys.argv[1:]
said = Path(folder) / f"{kind}-{os.getpid()}"
atexit.register(lambda: said.write_text(str(time.process_time())))


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        parts = [torch.nn.Linear(784, 128), *(torch.nn.Linear(128, 128) for _ in range(3)), torch.nn.Linear(128, 10)]
        self.net = torch.nn.Sequential(*(part for layer in parts for part in (layer, torch.nn.ReLU())))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    test_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


pl.seed_everything(0)
rows = DataLoader(TensorDataset(torch.randn(640, 784), torch.randint(0, 10, (640,))), batch_size=16)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=int(devices), max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
getattr(trainer, kind)(Small(), rows)
"""


def run_once(home: Path, strategy: str, devices: int, kind: str) -> float:
    """Processor seconds of all processes of a program together.

    Raises:
        RuntimeError: If the program fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(home / "compiled")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(home / "program.py"), strategy, str(devices), kind, folder]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
        said = [float(path.read_text()) for path in Path(folder).glob(f"{kind}-*")]
        if done.returncode or len(said) != devices:
            raise RuntimeError(f"{strategy} {kind} on {devices}: {len(said)} processes ended: {done.stderr[-3000:]}")
        return sum(said)


def samples_of(home: Path, devices: int, kind: str, pairs: int) -> list[Sample]:
    """One sample for each pair of programs."""
    for strategy in ("ddp", "mist"):
        run_once(home, strategy, devices, kind)  # modules are compiled, and the plan is kept
    samples: list[Sample] = []
    for pair in range(pairs):
        taken = {
            strategy: run_once(home, strategy, devices, kind)
            for strategy in sorted(("ddp", "mist"), reverse=pair % 2 == 1)
        }
        samples.append(
            {
                "what": kind,
                "processes": devices,
                "pair": pair,
                "ddp_seconds": taken["ddp"],
                "mist_seconds": taken["mist"],
                "beyond_ddp_seconds_per_process": (taken["mist"] - taken["ddp"]) / devices,
            }
        )
        print(samples[-1], flush=True)
    return samples


def main() -> None:
    """Run the pairs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples, words = [], []
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "program.py").write_text(_PROGRAM)
        for kind in ("fit", "test"):
            for devices in (1, 2):
                found = samples_of(home, devices, kind, options.pairs)
                beyond = median(float(item["beyond_ddp_seconds_per_process"] or 0) for item in found)
                least = min(float(item["mist_seconds"] or 0) for item in found)
                least -= min(float(item["ddp_seconds"] or 0) for item in found)
                words.append(f"{kind} on {devices}: {beyond:.2f} s (of the least {least / devices:.2f} s)")
                samples += found
    text = f"Processor seconds of a process beyond DDP's, medians of {options.pairs} pairs: {'; '.join(words)}."
    print(text)
    if not options.dry_run:
        print(write_record(make_record("processor-seconds", samples, notes=text)))


if __name__ == "__main__":
    main()
