"""Loops of the user's own under Fabric: every kind of plan on two processes against Fabric's DDP.

Each cell is the largest relative difference over six steps of AdamW, each of two accumulated batches, clipped by norm:
of every rank's losses, and of every parameter after the last step. The module returns its loss, and a forward runs the
plan's whole schedule; or the loop computes a loss of the module's logits, and the schedule goes on in backward. Double
precision must agree to 1e-10, single precision to 1e-5; the exit status is 1 if a cell does not. A plan that the model
does not allow is ``refused``, with the reason; in one precision and not in another, it counts as one that differs.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import lightning.fabric as lf
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.parity.cell import make_batches
from benchmarks.parity.plans import ROWS, Group, Layout, make_plan
from benchmarks.record import Sample, make_record, write_record
from lightning_mist import MistFabricStrategy, OffloadRatios, PlanError
from tests import zoo
from tests.integration.parity import TOLERANCE, make_optimizer, precision_of
from tests.machine import assume_profile
from tests.ranks import run_ranks

MODELS = ("gpt2_even", "llama_even", "vit")
PRECISIONS = {"float64": ("64-true", torch.float64), "float32": ("32-true", torch.float32)}
STEPS, ACCUMULATED, CLIP_NORM = 6, 2, 0.05

_AWAY = OffloadRatios(parameters=1.0, optimizer=1.0, activations=1.0)
_SOME = OffloadRatios(parameters=0.3, optimizer=1.0, activations=0.3)

ANYWHERE: dict[str, Layout] = {
    "dp 2, ZeRO 0, all recomputed": Layout(groups=(Group(dp=2, checkpointed=99),)),
    "dp 2, ZeRO 1, some recomputed": Layout(groups=(Group(dp=2, zero=1, checkpointed=2),)),
    "dp 2, ZeRO 2": Layout(groups=(Group(dp=2, zero=2),)),
    "dp 2, ZeRO 3, some recomputed": Layout(groups=(Group(dp=2, zero=3, checkpointed=1),)),
    "dp 2, ZeRO 0, offload 1 0 1 1": Layout(groups=(Group(dp=2, offload=_AWAY),)),
    "dp 2, ZeRO 3, some recomputed, offload 0.3 0 1 0.3": Layout(
        groups=(Group(dp=2, zero=3, checkpointed=1, offload=_SOME),)
    ),
}
"""Plans that train a loss of the loop's own, too."""

LAYOUTS: dict[str, Layout] = {
    **ANYWHERE,
    "dp 2, ZeRO 2, batches cut": Layout(groups=(Group(dp=2, zero=2),), parts=2),
    "pp 2": Layout(groups=(Group(), Group()), parts=2),
    "pp 2, some recomputed, offload 1 0 1 1": Layout(groups=(Group(checkpointed=1, offload=_AWAY), Group()), parts=2),
    "zero bubble, pp 2": Layout(groups=(Group(), Group()), schedule="zb-h1", parts=2),
    "interleaved, 2 groups of 2 chunks": Layout(groups=(Group(), Group()), schedule="interleaved-1f1b", chunks=2),
    "tp 2": Layout(groups=(Group(tp=2),)),
    "tp 2, sequence": Layout(groups=(Group(tp=2, sequence=True),)),
}

Curve = tuple[list[Tensor], dict[str, Tensor]]
"""A rank's losses by batch, and, on rank 0, the parameters after the last step."""


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(11)
    module, _ = zoo.make(name)
    return module.model.to(dtype).train()


def curve(strategy: str | MistFabricStrategy, name: str, precision: str, *, in_module: bool) -> Curve:
    """Train a model of the zoo in a loop."""
    module = build(name, PRECISIONS[precision][1])
    with precision_of(module):
        return _trained(strategy, module, name, precision, in_module=in_module)


def _trained(
    strategy: str | MistFabricStrategy, module: nn.Module, name: str, precision: str, *, in_module: bool
) -> Curve:
    option, dtype = PRECISIONS[precision]
    fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=2, precision=option)
    fabric.launch()
    model, optimizer = fabric.setup(module, make_optimizer(module))
    batches, losses = make_batches(name, dtype), []
    for step in range(STEPS):
        for number in range(ACCUMULATED):
            batch = dict(batches[number][2 * (step % 4) + fabric.global_rank])
            labels = batch.pop("labels")
            with fabric.no_backward_sync(model, enabled=number + 1 < ACCUMULATED):
                if in_module:
                    loss = model(**batch, labels=labels).loss
                else:
                    logits = model(**batch).logits
                    loss = (logits.logsumexp(-1) - logits[..., 0]).mean() * (1.0 + fabric.global_rank)
                fabric.backward(loss / ACCUMULATED)
            losses.append(loss.detach())
        fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, fabric.strategy.get_module_state_dict(model._forward_module)


@cache
def reference(name: str, precision: str, *, in_module: bool) -> Curve:
    return curve("ddp", name, precision, in_module=in_module)


def cell(name: str, plan: str, precision: str, folder: Path, *, in_module: bool) -> tuple[float, str]:
    """The largest difference on any rank, or why the plan is refused; the same on all ranks."""
    wanted = reference(name, precision, in_module=in_module)
    strategy = MistFabricStrategy(
        plan=make_plan(LAYOUTS[plan], zoo_layers(name), rows=ROWS),
        profile_directory=str(folder),
        returns_loss=in_module,
    )
    try:
        losses, parameters = curve(strategy, name, precision, in_module=in_module)
    except PlanError as error:
        return 0.0, str(error)
    worst = max(float((a - b).abs() / max(1.0, float(b.abs()))) for a, b in zip(losses, wanted[0], strict=True))
    if dist.get_rank() == 0:
        for key, value in wanted[1].items():
            worst = max(worst, float((parameters[key] - value).abs().max()) / max(1.0, float(value.abs().max())))
    told = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told), ""


@cache
def zoo_layers(name: str) -> int:
    module = build(name, torch.float32)
    return max(len(child) for child in module.modules() if isinstance(child, nn.ModuleList))


def fill(options: argparse.Namespace, folder: Path) -> tuple[list[Sample], dict[str, list[str]], int]:
    """The rows, the cells of every reason for a refusal, and how many cells differ."""
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    refusals: dict[tuple[str, str, bool], set[bool]] = {}
    differing = 0
    for precision in options.precisions:
        for in_module in (True, False):
            for plan in LAYOUTS if in_module else ANYWHERE:
                row: Sample = {"plan": plan, "precision": precision, "loss": "module's" if in_module else "loop's"}
                for name in options.models:
                    worst, refused = cell(name, plan, precision, folder, in_module=in_module)
                    is_wrong = not worst <= TOLERANCE[PRECISIONS[precision][1]]
                    differing += is_wrong
                    row[name] = "refused" if refused else f"differs ({worst:.1e})" if is_wrong else f"{worst:.1e}"
                    refusals.setdefault((name, plan, in_module), set()).add(bool(refused))
                    if refused:
                        reasons.setdefault(refused, []).append(f"{name} under {plan}")
                    if dist.get_rank() == 0:
                        print(f"{name}, {plan}, {precision}, {row['loss']} loss: {row[name]} {refused}", flush=True)
                rows.append(row)
    return rows, reasons, differing + sum(len(found) > 1 for found in refusals.values())


def work(options: argparse.Namespace, folder: Path) -> None:
    """What each rank does."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    rows, reasons, differing = fill(options, folder)
    if dist.get_rank() == 0:
        notes = (
            "Largest relative difference from Fabric's DDP over six clipped steps of two accumulated batches: of every "
            "rank's losses, and of every parameter after the last."
        )
        notes += "".join(f" Refused ({', '.join(cells)}): {reason}." for reason, cells in reasons.items())
        if not options.no_record:
            write_record(make_record("parity-fabric", rows, notes=notes))
    if differing:
        raise SystemExit(f"{differing} cells differ, or are refused in one precision alone")


def main(arguments: Iterable[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        assume_profile(Path(folder), 2)
        return run_ranks(2, partial(work, options, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
