"""Every kind of plan on every kind of model against a single process: gradients, and curves of twenty steps.

Each cell is the largest relative difference of a loss or of an entry of a gradient summed over two batches of every
rank. Double precision must agree to 1e-10, single precision to 1e-5, bfloat16 with masters to 1e-4; a cell that does
not is named with the first parameter that differs, and the exit status is 1. A plan that a model does not allow is
``refused``, with the reason.

Master weights are held against the same arithmetic in one process, roundings to 16 bits included. Tensor- and
context-parallel ranks round parts of what one process rounds whole, and data-parallel ranks of several stages what each
stage adds to the gradient of a tied weight: such plans are tried in 32 bits with masters in 64.

All ranks run in this process over an in-memory transport, so no more than one core is used, and no GPU.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter

import torch

from benchmarks.parity.cell import Optimize, Outcome, Subject, attempt, compare_curves, compare_gradients, subject
from benchmarks.parity.plans import LAYOUTS, Layout
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.plan import Plan
from tests.integration.masters import sgd
from tests.integration.parity import make_optimizer

MODELS = ("gpt2_even", "llama_even", "bert", "vit", "t5", "nano_even", "lora_llama", "encoder", "phi3", "falcon")
CURVE_MODELS = ("gpt2_even", "llama_even")

IN_16_BITS, IN_32_BITS = "bfloat16, float32 masters", "float32, float64 masters"

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    IN_16_BITS: (torch.bfloat16, torch.float32),
    IN_32_BITS: (torch.float32, torch.float64),
}
"""Types of what is computed with, and of master weights."""

CURVE_PRECISIONS = ("float64", IN_16_BITS, IN_32_BITS)


def adafactor(module: torch.nn.Module) -> torch.optim.Optimizer:
    """One that looks at rows and columns, and so at whole parameters; as AdamW's a large ``eps`` quiets rounding."""
    return torch.optim.Adafactor(module.parameters(), lr=1e-2, eps=(1e-5, 1e-3))


OPTIMIZERS: dict[str, Optimize] = {"AdamW": make_optimizer, "SGD": sgd, "Adafactor": adafactor}

Compare = Callable[[Subject, Plan], Outcome]


def plans_in(precision: str, plans: Sequence[str], optimizer: str = "") -> list[str]:
    """The layouts that are tried in a precision, and with an optimizer: whole parameters with one that needs these."""
    plans = [name for name in plans if not optimizer or LAYOUTS[name].whole == (optimizer == "Adafactor")]
    if PRECISIONS[precision][1] is None:
        return list(plans)
    in_16_bits = {name: rounds_as_one_process(LAYOUTS[name], clips=optimizer != "") for name in plans}
    return [name for name in plans if in_16_bits[name] == (precision == IN_16_BITS)]


def rounds_as_one_process(layout: Layout, *, clips: bool = False) -> bool:
    """Whether data-parallel ranks round to 16 bits what one process has too: no parts of it, nor of one stage alone.

    Args:
        clips: Whether it is clipped by the norm, which of even pieces adds up in another order.
    """
    if clips and not layout.whole and any(group.zero and group.dp * group.cp > 1 for group in layout.groups):
        return False
    is_shared = layout.tail > 1 or any(group.tp * group.cp > 1 for group in layout.groups)
    return not is_shared and (layout.num_stages == 1 or all(group.dp == 1 for group in layout.groups))


def fill(
    models: Sequence[str],
    plans: Sequence[str],
    precision: str,
    compare: Compare,
    progress: Callable[[str, str, Outcome], None],
    **more: str,
) -> tuple[list[Sample], dict[str, list[str]]]:
    """One row per plan with a cell per model.

    Args:
        models: Names in the zoo.
        plans: Names of layouts.
        precision: Name of a precision.
        compare: What to hold against a single process.
        progress: Told of every cell: model, plan, outcome.
        more: Further columns, the same in every row.

    Returns:
        The rows, and for every reason of a refusal the cells that it is of.
    """
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    dtype, masters = PRECISIONS[precision]
    for plan in plans_in(precision, plans, more.get("optimizer", "")):
        row: Sample = {"plan": plan, "precision": precision, **more}
        for model in models:
            outcome = attempt(compare, subject(model, dtype, masters=masters), LAYOUTS[plan])
            progress(model, plan, outcome)
            row[model] = outcome.text
            if outcome.refused:
                reasons.setdefault(outcome.refused, []).append(f"{model} under {plan}")
        rows.append(row)
    return rows, reasons


class Progress:
    """Prints every cell, and counts those that differ.

    Args:
        total: Number of cells to come.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self.differing = total, 0, 0
        self._started = perf_counter()

    def __call__(self, model: str, plan: str, outcome: Outcome) -> None:
        """One more cell."""
        self.done += 1
        self.differing += bool(outcome.differing)
        detail = outcome.differing or outcome.refused
        seconds = perf_counter() - self._started
        print(
            f"[{self.done}/{self.total}, {seconds:.0f} s] {model}, {plan}: {outcome.text} {detail}".rstrip(), flush=True
        )


def notes_of(what: str, reasons: dict[str, list[str]]) -> str:
    """What a reader must know."""
    lines = [what]
    for reason, cells in reasons.items():
        lines.append(f"Refused ({', '.join(cells)}): {reason}.")
    return " ".join(lines)


def _add(
    rows: list[Sample], reasons: dict[str, list[str]], more: Sequence[Sample], others: dict[str, list[str]]
) -> None:
    rows += more
    for reason, cells in others.items():
        reasons.setdefault(reason, []).extend(cell for cell in cells if cell not in reasons.get(reason, ()))


def main(arguments: Iterable[str] | None = None) -> int:
    """Fill the tables and write their records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), help="of gradients; without any, no record of them"
    )
    parser.add_argument("--curve-models", nargs="*", default=list(CURVE_MODELS), help="the same of curves")
    parser.add_argument("--plans", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="PLAN")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    curves_in = [
        (precision, optimizer)
        for precision in CURVE_PRECISIONS
        for optimizer in OPTIMIZERS
        if precision in options.precisions and (optimizer != "SGD" or PRECISIONS[precision][1] is not None)
    ]
    progress = Progress(
        sum(len(plans_in(precision, options.plans)) for precision in options.precisions) * len(options.models)
        + sum(len(plans_in(precision, options.plans, name)) for precision, name in curves_in)
        * len(options.curve_models)
    )
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    for precision in options.precisions if options.models else ():
        _add(rows, reasons, *fill(options.models, options.plans, precision, compare_gradients, progress))
    curves: list[Sample] = []
    curve_reasons: dict[str, list[str]] = {}
    for precision, optimizer in curves_in if options.curve_models else ():
        compare = partial(compare_curves, optimize=OPTIMIZERS[optimizer])
        found = fill(options.curve_models, options.plans, precision, compare, progress, optimizer=optimizer)
        _add(curves, curve_reasons, *found)
    print(f"{progress.done} cells, {progress.differing} differ")
    if not options.no_record:
        what = "Largest relative difference from a single process of losses and of gradients summed over two batches."
        if rows:
            write_record(make_record("parity", rows, notes=notes_of(what, reasons)))
        if curves:
            what = (
                "Largest relative difference from a single process over twenty clipped steps: of every rank's loss in "
                "each, and of every parameter after the last."
            )
            write_record(make_record("parity-curves", curves, notes=notes_of(what, curve_reasons)))
    return 1 if progress.differing else 0


if __name__ == "__main__":
    sys.exit(main())
