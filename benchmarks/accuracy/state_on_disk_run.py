"""One run of :mod:`benchmarks.accuracy.state_on_disk`: a byte-level GPT in one process under a memory limit."""

import argparse
import gc
import json
import resource
import sys
import tempfile
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.record import ROOT
from lightning_mist import Checkpointing, MistStrategy, Plan, StagePlan
from lightning_mist.cost import stage_memory
from lightning_mist.model import map_module, trace_model
from lightning_mist.plan import OffloadRatios, StageMesh

LAYERS, WIDTH, LENGTH, ROWS, STEPS = 12, 768, 128, 2, 6

MOVED = {
    "nothing": {},
    "optimizer state": {"optimizer": 1.0},
    "optimizer state and parameters": {"optimizer": 1.0, "parameters": 1.0},
}


def plan_of(moved: str) -> Plan:
    """One stage, all its layers recomputed."""
    stage = StagePlan(
        layers=(0, LAYERS),
        mesh=StageMesh(devices=(0,)),
        microbatch_size=ROWS,
        checkpointing=Checkpointing(layers=LAYERS),
        offload=OffloadRatios(**MOVED[moved]),
    )
    return Plan(global_batch_size=ROWS, num_microbatches=1, stages=(stage,))


def kernel_bytes(name: str) -> int:
    """One of the kernel's figures of this process (proc(5))."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


class Watched(pl.Callback):
    """Losses, ends of steps, and the most memory of its own that the process has at any time."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[float] = []
        self.most = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            if len(self.losses) > 1:  # The first step makes the optimizer's state.
                self.most = max(self.most, kernel_bytes("RssAnon") + kernel_bytes("RssFile"))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.ends.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self._is_over.set()


def main() -> None:
    """Train and write what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moved", choices=MOVED, required=True)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from model import ByteGPT

    pl.seed_everything(1, verbose=False)
    module, plan = ByteGPT(layers=LAYERS, width=WIDTH, heads=12, length=LENGTH), plan_of(options.moved)
    data = torch.randint(0, 256, (ROWS * STEPS, LENGTH + 1))
    (predicted,) = stage_memory(_spec(module, data[:ROWS]), plan)
    gc.collect()
    before = kernel_bytes("RssAnon") + kernel_bytes("RssFile")
    found: dict[str, Any] = {
        "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
        "predicted_bytes": predicted.peak_bytes,
        "predicted_host_bytes": predicted.host_bytes,
    }
    if options.limit:
        limit = kernel_bytes("VmData") + options.limit
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    watched = Watched()
    with tempfile.TemporaryDirectory() as folder:
        strategy = MistStrategy(
            plan=plan, self_check=False, profile_directory=folder, offload_directory=str(Path(folder) / "state")
        )
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            callbacks=[watched],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(module, DataLoader([(row[:-1], row[1:]) for row in data], batch_size=ROWS))
        except (RuntimeError, MemoryError) as error:
            found["error"] = str(error).splitlines()[0]
    watched.on_train_end()
    steps = [later - earlier for earlier, later in pairwise(watched.ends[1:])]
    found |= {
        "losses": watched.losses,
        "grown_bytes": watched.most - before,
        "step_seconds": median(steps) if steps else None,
    }
    options.out.write_text(json.dumps(found))


def _spec(module: Any, batch: torch.Tensor) -> Any:
    batches = (batch[:, :-1], batch[:, 1:])

    def step(value: Any) -> Any:
        return module.training_step(value, 0)

    optimizer = torch.optim.AdamW(module.parameters())
    return trace_model(module, batches, call=step, module_map=map_module(module, step, batches), optimizer=optimizer)


if __name__ == "__main__":
    main()
