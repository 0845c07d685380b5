"""Steps that update metric objects, or step their optimizers themselves, under every kind of plan against DDP.

A cell is the largest relative difference of any number that a rank saw in two epochs: outputs and what was logged,
batch by batch, what metrics hold and give at the end of epochs, weights, and the optimizers' state in a checkpoint.
Double precision must agree to 1e-10, single precision to 1e-5; a cell that does not is named, and the exit status is 1.
Ranks are processes, by Lightning as a project would start it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassPrecision

from benchmarks.parity.evaluated import keep, make_trainer
from benchmarks.parity.evaluation import Seen, distance, on_ranks
from benchmarks.parity.plans import LAYOUTS, Group, Layout, make_plan
from benchmarks.parity.table import notes_of
from benchmarks.record import Sample, make_record, write_record
from benchmarks.uses.session import plain
from lightning_mist import OffloadRatios, Plan
from tests.integration.parity import TOLERANCE
from tests.traps.context import Decoder
from tests.traps.manual import Accumulates, Closure, Gan, Manual
from tests.traps.project import LAYERS, ROWS, VOCABULARY, loader

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
_STATE_AWAY = OffloadRatios(optimizer=1.0)

OF_ONE_STAGE: dict[str, Layout] = {
    "dp 2, ZeRO 1": Layout(groups=(Group(dp=2, zero=1),)),
    "dp 2, ZeRO 2": Layout(groups=(Group(dp=2, zero=2),)),
    "dp 4, ZeRO 1, HSDP 2 x 2": Layout(groups=(Group(dp=4, zero=1, shard=2),)),
    "dp 4, ZeRO 2, HSDP 2 x 2, some recomputed": Layout(groups=(Group(dp=4, zero=2, shard=2, checkpointed=2),)),
    "dp 2, ZeRO 0, all recomputed": Layout(groups=(Group(dp=2, checkpointed=99),)),
    "dp 2, ZeRO 0, offload 0 0 1 0": Layout(groups=(Group(dp=2, offload=_STATE_AWAY),)),
    "dp 2, ZeRO 1, some recomputed, offload 0 0 1 0": Layout(
        groups=(Group(dp=2, zero=1, checkpointed=2, offload=_STATE_AWAY),)
    ),
}
"""Plans of one stage and whole batches, under which steps may do everything by themselves."""

SHARED: dict[str, Layout] = {
    "dp 2, ZeRO 3, batches cut, some recomputed": Layout(groups=(Group(dp=2, zero=3, checkpointed=1),), parts=2),
    **{
        name: LAYOUTS[name]
        for name in (
            "pp 2 x dp 2",
            "zero bubble, pp 2",
            "interleaved, 2 groups of 2 chunks",
            "tp 2",
            "tp 2, sequence",
            "pp 2 x tp 2, sequence, some recomputed",
            "cp 2",
            "pp 2 x cp 2, ZeRO 2",
            "stages (dp 1, tp 2), (dp 2, tp 1)",
        )
    },
}
"""Plans whose ranks run the step for batches of others, or for parts."""


class Metered(Decoder):
    """Updates metrics of every kind, logs objects and values, and returns what one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.mean, self.returned = (
            MulticlassAccuracy(VOCABULARY),
            MeanMetric(),
            MulticlassAccuracy(VOCABULARY),
        )
        self.every = MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassPrecision(VOCABULARY)], prefix="all_")
        self.listed = [MulticlassConfusionMatrix(VOCABULARY), MeanMetric()]
        self.metrics = [item for item in (*self.modules(), *self.listed) if isinstance(item, Metric)]
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A step that measures what it predicts."""
        logits, labels = self.logits(batch).flatten(0, 1), batch["y"].flatten()
        loss = F.cross_entropy(logits, labels)
        self.acc(logits, labels)
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        self.mean.update(loss, weight=2.0)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.every(logits, labels), on_step=True, on_epoch=True)
        if batch_idx % 2 == 0:
            self.listed[0].update(logits, labels)
            self.listed[1](logits)
        return {"loss": loss, "acc": self.returned(logits, labels)}

    def on_train_epoch_end(self) -> None:
        """Keep what metrics hold, and use it."""
        self.seen.append(plain([[item.metric_state, item.update_count] for item in self.metrics]))
        self.log("by_hand", self.listed[1].compute())
        for item in self.listed:
            item.reset()


STEPS: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Layout]]] = {
    "metrics": (Metered, OF_ONE_STAGE | SHARED),
    "one optimizer by hand": (Manual, OF_ONE_STAGE),
    "every second batch by hand": (Accumulates, OF_ONE_STAGE),
    "in a closure by hand": (Closure, OF_ONE_STAGE),
    "two optimizers in turn": (partial(Gan, toggles=True), OF_ONE_STAGE),
}
"""What steps do: the module, and the plans that it is tried under."""


class Kept(Callback):
    """Keeps what every batch gives and logs."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Keep a batch's."""
        self.kept.append(plain([outputs, {**trainer.callback_metrics}]))


def trained(step: str, plan: Plan | None, dtype: torch.dtype, folder: Path) -> Iterator[tuple[str, Any]]:
    """Train, under DDP without a plan; what this rank saw, by what it is."""
    pl.seed_everything(3, verbose=False)
    module, watch = STEPS[step][0](), Kept()
    for item in getattr(module, "metrics", ()):
        item.set_dtype(dtype)
    trainer = make_trainer(plan, dtype, folder, watch)
    trainer.fit(module.to(dtype), loader(), None)
    yield "batches", watch.kept
    yield "epochs", [getattr(module, "seen", []), plain({**trainer.logged_metrics})]
    trainer.save_checkpoint(path := folder / "saved.ckpt")
    if trainer.is_global_zero:
        saved = torch.load(path, weights_only=False)
        yield "saved", plain([saved["state_dict"], saved["optimizer_states"], saved["lr_schedulers"]])


def cell(ddp: list[Seen], found: list[Seen], tolerance: float) -> tuple[str, str]:
    """The largest difference on any rank, as text, and what differs; a refusal with its reason."""
    error = next((error for _, error in found if error), "")
    if error:
        is_refused = "Traceback" not in error and not any(seen for seen, _ in found)
        return "refused" if is_refused else "differs", " ".join(error.split()).rstrip(".")
    worst, where = max(
        (
            (*distance(wanted[key], seen.get(key)), rank, key)
            for rank, ((wanted, _), (seen, _)) in enumerate(zip(ddp, found, strict=True))
            for key in wanted
        ),
        key=lambda one: one[0],
    )[:2]
    return ("differs", f"off by {worst:.1e} at{where}") if not worst <= tolerance else (f"{worst:.1e}", "")


def main(arguments: Iterable[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS), metavar="STEP")
    parser.add_argument("--plans", nargs="+", default=list(OF_ONE_STAGE | SHARED), metavar="PLAN")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    ddp: dict[tuple[str, str, int], list[Seen]] = {}
    with tempfile.TemporaryDirectory() as directory:

        def run(step: str, plan: Plan | None, precision: str, world: int) -> list[Seen]:
            folder = Path(tempfile.mkdtemp(dir=directory))
            seen = partial(trained, step, plan, PRECISIONS[precision], folder)
            return on_ranks(world, folder, partial(keep, seen))

        for step in options.steps:
            for plan, layout in STEPS[step][1].items():
                if plan not in options.plans:
                    continue
                row: Sample = {"step": step, "plan": plan}
                world = sum(group.ranks for group in layout.groups)
                for precision in options.precisions:
                    if (step, precision, world) not in ddp:
                        ddp[step, precision, world] = run(step, None, precision, world)
                        assert not any(error for _, error in ddp[step, precision, world]), ddp[step, precision, world]
                    found = run(step, make_plan(layout, LAYERS, rows=ROWS), precision, world)
                    row[precision], why = cell(ddp[step, precision, world], found, TOLERANCE[PRECISIONS[precision]])
                    print(f"{step}, {plan}, {precision}: {row[precision]} {why}".rstrip(), flush=True)
                    if row[precision] == "refused":
                        reasons.setdefault(why, []).append(f"{step} under {plan}")
                rows.append(row)
    differing = sum(row[precision] == "differs" for row in rows for precision in options.precisions)
    print(f"{len(rows) * len(options.precisions)} cells, {differing} differ")
    if not options.no_record:
        what = "Largest relative difference from DDP of anything that a rank sees in two epochs."
        write_record(make_record("parity-steps", rows, notes=notes_of(what, reasons)))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
