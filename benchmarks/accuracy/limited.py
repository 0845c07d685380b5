"""Lower the memory limit step by step until nothing fits, training a few steps under each.

Started in several processes by :mod:`benchmarks.launch`. Each entry of the file has the limit, the plan, and predicted
and measured peak bytes of every stage; the last one has the error.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from benchmarks.plans import SEARCHED
from benchmarks.record import ROOT
from lightning_mist import InfeasibleError, MistStrategy
from lightning_mist.plan import to_json

STEPS = 4
"""One to warm up, one to meter, two to time: the least that gives a report."""


def train(limit: int | None, world_size: int, folder: Path, rows: int, profiles: Path) -> dict[str, object]:
    """Plan and train a few steps under a limit."""
    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    pl.seed_everything(0, verbose=False)
    strategy = MistStrategy(
        memory_limit=limit,
        search=SEARCHED,
        profile_directory=str(profiles),
        plan_path=str(folder / "plan.json"),
        self_check=False,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = ByteGPT(layers=6, width=64, length=64)
    trainer.fit(model, StandardLibrary(length=64, batch_size=rows))
    plan, report = strategy.plan, strategy.report
    assert plan is not None
    assert report is not None
    return {
        "limit": limit,
        "plan": json.loads(to_json(plan)),
        "predicted_bytes": [stage.predicted_bytes for stage in report.stages],
        "measured_bytes": [stage.measured_bytes for stage in report.stages],
    }


def lower(world_size: int, factor: float, rows: int, profiles: Path | None = None) -> list[dict[str, object]]:
    """Train under ever lower limits until none fits."""
    entries: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limit = None
        while True:
            try:
                entries.append(train(limit, world_size, folder, rows, profiles or folder / "profiles"))
            except InfeasibleError as error:
                return [*entries, {"limit": limit, "error": str(error)}]
            highest = max(entries[-1]["measured_bytes"])  # type: ignore[call-overload]
            limit = int(highest * factor) if limit is None else int(limit * factor)


def main() -> None:
    """Run, and let rank 0 write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--factor", type=float, default=0.75, help="each limit in units of the one before")
    parser.add_argument("--rows", type=int, default=8, help="rows of each rank's batch")
    parser.add_argument("--profiles", type=Path, help="where the machine's profile is kept; else it is measured anew")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    entries = lower(world_size, arguments.factor, arguments.rows, arguments.profiles)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        arguments.out.write_text(json.dumps({"entries": entries}, indent=1))


if __name__ == "__main__":
    main()
