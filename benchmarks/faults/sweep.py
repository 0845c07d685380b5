"""Every kind of harm at every point of a fit on two processes, under every plan: how all of them end.

A cell is good if every process ends within a minute of the harm, one of them says what happened, and every checkpoint
that is there can be read. What came after the training counts as good if training had ended well.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.faults.points import KINDS, POINTS, TEXT
from benchmarks.faults.project import DONE, HASTY, PLANS, runs_under, train
from benchmarks.faults.worlds import Fate, run_worlds
from benchmarks.record import Sample, make_record, write_record

SAID = {
    "kill": ("ended without a word", "Connection closed by peer", "Connection reset by peer"),
    "leave": ("ended without a word", "Connection closed by peer", "Connection reset by peer"),
    "term": ("SIGTERM", "ended without a word", "Connection closed by peer"),
    "interrupt": ("KeyboardInterrupt",),
    "error": (TEXT,),
    "memory": (TEXT,),
    "exit": (TEXT,),
}

TOGETHER = ("all-term", "all-interrupt", "all-error")


def every_name() -> list[str]:
    """All cells."""
    names = [
        f"{point}/{kind}/{plan}"
        for point in POINTS
        for kind in KINDS
        for plan in PLANS
        if runs_under(POINTS[point], plan)
    ]
    within = ("first forward", "forward", "optimizer", "batch end", "loader", "validation", "epoch end")
    return names + [
        f"{point}/{kind}/{plan}" for point in within for kind in TOGETHER for plan in PLANS if plan != "auto"
    ]


def verdict(name: str, fate: Fate, folder: Path) -> str:
    """What became of a world: ``"ends"``, ``"trained"``, or what is bad about it."""
    kind = name.split("/")[1].removeprefix("all-")
    if fate.seconds is None:
        return "not reached" if None not in fate.codes else "hangs before the harm"
    if None in fate.codes:
        return "hangs"
    for path in folder.rglob("*.ckpt"):
        try:
            torch.load(path, weights_only=False)
        except Exception as error:  # whatever it is, the checkpoint cannot be read
            return f"broken checkpoint: {type(error).__name__}"
    if fate.output.count(DONE) >= len(fate.codes) - 1 and set(fate.codes) <= {0, -9, -15, 1}:
        return "trained"
    if not any(text in fate.output for text in SAID[kind]):
        return "ends, but nobody says why"
    return "ends"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run cells and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", help="POINT/KIND/PLAN; all by default")
    parser.add_argument("--jobs", type=int, default=4, help="how many run at the same time")
    parser.add_argument("--share", type=int, default=1, help="only every so many-th cell")
    parser.add_argument("--folder", type=Path, help="where logs and checkpoints stay")
    parser.add_argument("--out", type=Path, help="write verdicts there as JSON, and no record")
    parser.add_argument("--hasty", action="store_true", help="ranks wait for each other a few seconds only")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.hasty:
        os.environ[HASTY] = "1"
    names: Sequence[str] = options.cells or every_name()[:: options.share]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found: dict[str, tuple[str, Fate]] = {}

        def tell(name: str, fate: Fate) -> None:
            found[name] = verdict(name, fate, folder / name.replace("/", "_")), fate
            seconds = "" if fate.seconds is None else f"{fate.seconds:.1f} s"
            print(f"{name}: {found[name][0]} {list(fate.codes)} {seconds}", flush=True)

        run_worlds(train, names, folder, jobs=options.jobs, tell=tell)
        samples = [_sample(name, *found[name], folder / name.replace("/", "_")) for name in names]
    if options.out is not None:
        content = [{**sample, "output": found[str(sample["cell"])][1].output} for sample in samples]
        options.out.write_text(json.dumps(content), encoding="utf-8")
    else:
        print(f"wrote {write_record(make_record('faults', _summary(samples)))}")
    return int(any(sample["verdict"] not in ("ends", "trained") for sample in samples))


def _sample(name: str, text: str, fate: Fate, folder: Path) -> Sample:
    point, kind, plan = name.split("/")
    return {
        "cell": name,
        "point": point,
        "kind": kind,
        "plan": plan,
        "verdict": text,
        "end_seconds": fate.seconds,
        "saved": (folder / "checkpoints" / "on_exception.ckpt").is_file(),
    }


def _summary(samples: Sequence[Sample]) -> list[Sample]:
    """One row per point and kind of harm with a cell per plan."""
    rows: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        key = str(sample["point"]), str(sample["kind"])
        row = rows.setdefault(key, {"point": key[0], "harm": key[1], **dict.fromkeys(PLANS)})
        seconds = sample["end_seconds"]
        after = f", {seconds:.0f} s" if isinstance(seconds, float) else ""
        saved = ", saved" if sample["saved"] else ""
        row[str(sample["plan"])] = f"{sample['verdict']}{after}{saved}"
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(main())
