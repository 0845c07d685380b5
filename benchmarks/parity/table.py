"""Every kind of plan on every kind of model against a single process: gradients, and curves of twenty steps.

Each cell is the largest relative difference of a loss or of an entry of a gradient summed over two batches of every
rank. Double precision must agree to 1e-10, single precision to 1e-5; a cell that does not is named with the first
parameter that differs, and the exit status is 1. A plan that a model does not allow is ``refused``, with the reason.

All ranks run in this process over an in-memory transport, so no more than one core is used, and no GPU.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import torch

from benchmarks.parity.cell import Outcome, Subject, attempt, compare_curves, compare_gradients, subject
from benchmarks.parity.plans import LAYOUTS
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.plan import Plan

MODELS = ("gpt2_even", "llama_even", "bert", "vit", "t5", "nano_even", "lora_llama", "encoder")
CURVE_MODELS = ("gpt2_even", "llama_even")
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}

Compare = Callable[[Subject, Plan], Outcome]


def fill(
    models: Sequence[str],
    plans: Sequence[str],
    precision: str,
    compare: Compare,
    progress: Callable[[str, str, Outcome], None],
) -> tuple[list[Sample], dict[str, list[str]]]:
    """One row per plan with a cell per model.

    Args:
        models: Names in the zoo.
        plans: Names of layouts.
        precision: ``"float64"`` or ``"float32"``.
        compare: What to hold against a single process.
        progress: Told of every cell: model, plan, outcome.

    Returns:
        The rows, and for every reason of a refusal the cells that it is of.
    """
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    for plan in plans:
        row: Sample = {"plan": plan, "precision": precision}
        for model in models:
            outcome = attempt(compare, subject(model, PRECISIONS[precision]), LAYOUTS[plan])
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


def main(arguments: Iterable[str] | None = None) -> int:
    """Fill the tables and write their records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--curve-models", nargs="*", default=list(CURVE_MODELS))
    parser.add_argument("--plans", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="PLAN")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(None if arguments is None else list(arguments))
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    cells = len(options.plans) * (len(options.models) * len(options.precisions) + len(options.curve_models))
    progress = Progress(cells)
    rows: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    for precision in options.precisions:
        more, refused = fill(options.models, options.plans, precision, compare_gradients, progress)
        rows += more
        for reason, found in refused.items():
            reasons.setdefault(reason, []).extend(cell for cell in found if cell not in reasons.get(reason, ()))
    curves, curve_reasons = fill(options.curve_models, options.plans, "float64", compare_curves, progress)
    print(f"{progress.done} cells, {progress.differing} differ")
    if not options.no_record:
        what = "Largest relative difference from a single process of losses and of gradients summed over two batches."
        write_record(make_record("parity", rows, notes=notes_of(what, reasons)))
        if curves:
            what = (
                "Largest relative difference from a single process over twenty clipped AdamW steps: of every rank's "
                "loss in each, and of every parameter after the last."
            )
            write_record(make_record("parity-curves", curves, notes=notes_of(what, curve_reasons)))
    return 1 if progress.differing else 0


if __name__ == "__main__":
    sys.exit(main())
