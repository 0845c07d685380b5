"""Other people's projects with one word changed, beside DDP: ``python -m benchmarks.projects.run SOURCES``.

``SOURCES`` is a folder with checkouts of the repositories whose scripts are run; ``docs/projects.md`` says which, and
which packages must be installed. Each project trains with ``strategy="ddp"`` and then with ``strategy="mist"`` on two
CPU processes; what every rank saw is compared: each step's loss, callback and logged metrics, parameters and buffers.
"""

import argparse
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import Any

import torch

from benchmarks.projects.worker import STARTED
from benchmarks.record import ROOT, Sample, make_record, write_record

RANKS = 2
TOLERANCE = 1e-5
"""Of the largest number beside it: everything here trains in single precision, but for what its authors chose."""

PROJECTS: dict[str, tuple[str, str]] = {
    "Lightning: bug report": ("scripts.bug_report", "lightning"),
    "Lightning: language model": ("scripts.transformer", "lightning"),
    "Lightning: autoencoder": ("scripts.autoencoder", "lightning"),
    "Lightning: classifier": ("scripts.classifier", "lightning"),
    "Lightning: ImageNet": ("scripts.imagenet", "torchvision"),
    "lightning-hydra-template": ("scripts.hydra_template", "hydra-core"),
    "BERT classifier": ("packages.bert", "transformers"),
    "pytorch-forecasting TFT": ("packages.forecasting", "pytorch-forecasting"),
    "gluonts PatchTST": ("packages.gluonts", "gluonts"),
    "neuralforecast PatchTST": ("packages.neuralforecast", "neuralforecast"),
    "chemprop MPNN": ("packages.chemprop", "chemprop"),
    "darts N-BEATS": ("packages.darts", "darts"),
    "lightly SimCLR": ("packages.simclr", "lightly"),
    "segmentation_models U-Net": ("packages.segmentation", "segmentation_models_pytorch"),
    "scvi-tools scVI": ("packages.scvi", "scvi-tools"),
}
"""By name: the function that trains it, and the package whose version is noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What came of one training.

    Attributes:
        ranks: What every rank kept; empty if training failed.
        lines: Lines printed by all processes.
        printed: What they printed.
    """

    ranks: tuple[dict[str, Any], ...]
    lines: int
    printed: str

    @property
    def seconds(self) -> float | None:
        """Until the first step had ended."""
        return self.ranks[0]["seconds"] if self.ranks else None


def trained(project: str, strategy: str, folder: Path, sources: Path, *, patience_seconds: float) -> Training:
    """Train a project in a folder of its own."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.projects.worker", project, strategy, str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PROJECTS_SOURCES": str(sources),
        STARTED: str(time()),
    }
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=patience_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed = f"{process.communicate()[0]}\nended after {patience_seconds} s"
    files = [folder / f"{rank}.pickle" for rank in range(RANKS)]
    ranks = tuple(pickle.loads(path.read_bytes()) for path in files if path.exists())
    complete = len(ranks) == RANKS and process.returncode == 0
    return Training(ranks=ranks if complete else (), lines=sum(map(bool, printed.split("\n"))), printed=printed)


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, str]:
    """The largest difference of two ranks' values in parts of the largest number of each, and of which value."""
    if one.keys() != other.keys():
        return math.inf, f"{sorted(one.keys() ^ other.keys())[:5]} not in both"
    worst, where = 0.0, ""
    for name, value in one.items():
        a, b = torch.as_tensor(value).double(), torch.as_tensor(other[name]).double()
        if a.shape != b.shape:
            return math.inf, f"{name}: {tuple(b.shape)} in place of {tuple(a.shape)}"
        if a.numel() == 0 or (torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())):
            continue
        found = float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))
        if math.isnan(found):
            return math.inf, name
        if found > worst:
            worst, where = found, name
    return worst, where


def row_of(name: str, ddp: Training, mist: Training) -> Sample:
    """What became of a project."""
    row: Sample = {"project": name, "version": _version(PROJECTS[name][1])}
    if not ddp.ranks:
        return {**row, "like DDP": "DDP itself fails" if not mist.ranks else "trains, DDP itself fails"}
    if not mist.ranks:
        return {**row, "like DDP": "does not train"}
    found = [difference(a["values"], b["values"]) for a, b in zip(ddp.ranks, mist.ranks, strict=True)]
    worst, where = max(found)
    losses = sum(key.startswith("loss of step") for key in ddp.ranks[0]["values"])
    return {
        **row,
        "plan": mist.ranks[0]["plan"],
        "steps": losses,
        "values": len(ddp.ranks[0]["values"]) * RANKS,
        "like DDP": "to the bit" if worst == 0 else "same" if worst <= TOLERANCE else f"other: {where}",
        "largest_difference": worst,
        "ddp_first_step_seconds": ddp.seconds,
        "mist_first_step_seconds": mist.seconds,
        "ddp_lines": ddp.lines,
        "mist_lines": mist.lines,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with the checkouts")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="projects with this in their name")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds after which a training is ended")
    parser.add_argument("--keep", type=Path, help="folder for what the processes print")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    rows = []
    for name, (project, _) in PROJECTS.items():
        if options.only and not any(text in name for text in options.only):
            continue
        with tempfile.TemporaryDirectory() as directory:
            results = {
                strategy: trained(
                    project,
                    strategy,
                    Path(directory) / strategy,
                    options.sources.resolve(),
                    patience_seconds=options.patience,
                )
                for strategy in ("ddp", "mist")
            }
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for strategy, result in results.items():
                (options.keep / f"{project}-{strategy}.txt").write_text(result.printed)
        rows.append(row_of(name, results["ddp"], results["mist"]))
        print(rows[-1], flush=True)
    if not options.no_record:
        print(write_record(make_record("projects", rows, notes=f"Two processes; same: within {TOLERANCE}.")))
    return 0 if all(str(row["like DDP"]) in ("to the bit", "same") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
