"""Some thousands of inputs of a training run that are wrong or odd, of five kinds: how each of them ends.

Plan files, files in the folder of measurements, checkpoints, batches, and arguments. Each run ends well if every rank
says, with an error that is raised on purpose, what is wrong and what to do, or if it trains, and then exactly what DDP
trains; and if it ends in time.
"""

import argparse
import json
import pickle
import random
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.bad_argument_cases import argument_sets
from benchmarks.faults.bad_batch_cases import batch_runs
from benchmarks.faults.bad_cache_cases import cache_works
from benchmarks.faults.bad_checkpoint_cases import content_runs, read, spoilt_bytes
from benchmarks.faults.bad_plan_cases import plan_files
from benchmarks.faults.series import End, run_series
from benchmarks.faults.small_fits import PLANS, RANKS, Batches, fit, has_begun
from benchmarks.record import Sample, make_record, write_record
from lightning_mist import MistStrategy
from tests.machine import assume_profile
from tests.traps.outcome import outcome_of

MOST_SECONDS = 60.0
"""What has not ended by then counts as never ending."""

DDP_SECONDS = 15.0
"""What DDP itself has not ended by then it never ends."""

REFUSED_BY_TORCH = "what torch does not unpickle"

TOLERANCE = 1e-10
"""Largest relative difference to DDP."""

WAY_OUT = re.compile(
    r"\b(add|build|choose|copy|correct|did you mean|divide|edit|end|give|ignored|is not used|(is|are) needed|keep|"
    r"known (here |schedules )?are|known here|leave|let|lies in|load|make|measure|must|nearest|needs|plan again|"
    r"remove|save|see that|set|try|update|use|write|ZeRO stages are)\b",
    re.I,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input.

    Attributes:
        kind: Of input, for tables: the first words.
        family: What is wrong with it, for tables: the others.
        text: What it is, for people who look for one.
        work: What each rank runs.
        reference: Name of what it must equal if it trains.
        ddp: What gives that, where it is not the fit of all good inputs.
    """

    kind: str
    family: str
    text: str
    work: Callable[[], Any]
    reference: str = "ddp"
    ddp: Callable[[], Any] | None = None


@dataclass(slots=True)
class Verdicts:
    """What became of inputs, beside what DDP makes of them."""

    references: dict[str, Sequence[Any]]
    found: list[Sample] = field(default_factory=list)

    def add(self, case: Case, end: End) -> None:
        """Judge one, and print it if it is bad."""
        text, said = verdict(end, self.references.get(case.reference, ()))
        self.found.append({"kind": case.kind, "family": case.family, "verdict": text, "seconds": end.seconds})
        if text not in GOOD:
            print(f"{text}: {case.kind}, {case.family}: {case.text}\n{_tail(said)}", flush=True)


def _tail(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip(" ^~")]
    return "\n".join(f"    {line[:600]}" for line in lines[-6:])


GOOD = ("refused", "stopped", "trained", "as ddp")


def verdict(end: End, reference: Sequence[Any]) -> tuple[str, str]:
    """One of :data:`GOOD` or what is bad, and what was said."""
    found = [None if rank is None else rank.get("found", rank) for rank in end.ranks]
    wanted = {_without_numbers(item["error"]) for item in reference if item is not None and "error" in item}
    said = {_without_numbers(item["error"]) for item in found if item is not None and "error" in item}
    wanted.add(REFUSED_BY_TORCH)
    if said and said & wanted and not end.is_late:  # parts of batches have other sizes
        return "as ddp", next(iter(said & wanted))
    made = outcome_of(reference, found, tolerance=TOLERANCE, is_late=end.is_late, output=end.output)
    kind = "trained" if made.kind == "equal" else made.kind
    if kind in ("refused", "stopped") and not WAY_OUT.search(made.text):
        kind = "no way out"
    return kind, made.text


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def plan_cases(folder: Path, chance: random.Random, count: int) -> list[Case]:
    """Plan files."""

    def work(path: str) -> Callable[[], Any]:
        return lambda: fit(lambda: MistStrategy(plan=path, profile_directory=str(folder / "profiles")), folder)

    place = folder / "plans"
    place.mkdir()
    return [
        Case(kind="plan files", family=family, text=path, work=work(path))
        for family, path in plan_files(place, chance, count)
    ]


def batch_cases(folder: Path, chance: random.Random, count: int) -> list[Case]:
    """Batches, each under some plans."""

    def work(batches: Batches, plan: str) -> Callable[[], Any]:
        return lambda: fit(lambda: MistStrategy(plan=PLANS[plan]), folder, loader=batches)

    return [
        Case(
            kind="batches",
            family=family,
            text=f"{name}, under {plan}",
            work=work(batches, plan),
            ddp=lambda batches=batches: fit(lambda: "ddp", folder, loader=batches),
            reference=name,
        )
        for family, name, batches, plan in batch_runs(chance, 3 * count // 2)
    ]


def cache_cases(folder: Path, chance: random.Random, count: int) -> list[Case]:
    """Files in the folder of measurements; what is measured again says so, as what is refused does."""
    return [
        Case(kind=name, family=family, text=family, work=work, reference="nothing")
        for name, family, work in cache_works(folder / "caches", chance, count)
    ]


def argument_cases(folder: Path, chance: random.Random, count: int) -> list[Case]:
    """Arguments of the strategy; those that are taken after all train as DDP does."""
    machine = assume_profile(folder / "profiles", RANKS)

    def work(make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: fit(lambda: MistStrategy(**{"profile_directory": str(machine), **make()}), folder)

    return [Case(kind="arguments", family=family, text=text, work=work(make)) for family, text, make in argument_sets()]


def checkpoint_cases(folder: Path, chance: random.Random, count: int) -> list[Case]:
    """Checkpoints: bytes, read as a fit reads them, and contents, from which a fit goes on."""
    place = folder / "checkpoints"
    place.mkdir()

    def work(path: Path) -> Callable[[], Any]:
        def reads() -> Any:
            try:
                read(path)
            except pickle.UnpicklingError:  # of torch.load(weights_only=True), as under DDP
                return {"error": REFUSED_BY_TORCH, "is_ours": False, "has_begun": False}
            return {"whole": None}

        return reads

    found = [
        Case(kind="checkpoints", family=family, text=str(path), work=work(path), reference="nothing")
        for family, path in spoilt_bytes(place, chance, count // 4)
    ]
    return found + [
        Case(kind="checkpoints", family="contents", text=name, work=runs, ddp=ddp, reference=name)
        for name, runs, ddp in content_runs(place)
    ]


KINDS: dict[str, Callable[[Path, random.Random, int], list[Case]]] = {
    "caches": cache_cases,
    "checkpoints": checkpoint_cases,
    "batches": batch_cases,
    "arguments": argument_cases,
    "plans": plan_cases,
}


def references(cases: Sequence[Case], folder: Path) -> dict[str, Sequence[Any]]:
    """What DDP makes of what cases are held against, by name."""
    works = {"ddp": lambda: fit(lambda: "ddp", folder)}
    works |= {case.reference: case.ddp for case in cases if case.ddp is not None}
    ends = run_series(list(works.values()), folder, ranks=RANKS, seconds=DDP_SECONDS, has_begun=has_begun)
    found = {name: _found(end) for name, end in zip(works, ends, strict=True)}
    return {**found, "nothing": [{"whole": None}] * RANKS}


def _found(end: End) -> list[Any]:
    return [None if rank is None else rank.get("found", rank) for rank in end.ranks]


def main(arguments: Iterable[str] | None = None) -> int:
    """Try all inputs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="how many of each family, about, where there are many")
    parser.add_argument("--only", default="", help="only what has this in its text")
    parser.add_argument("--share", type=float, default=1.0, help="only so many of the inputs, by chance")
    parser.add_argument("--folder", type=Path, help="where files stay; kinds tried there are not tried again")
    parser.add_argument("--dry", action="store_true", help="write no record")
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        judged, chance = Verdicts({}), random.Random(options.seed)
        for kind in options.kinds or KINDS:
            kept = folder / f"{kind}.json"
            if kept.is_file():
                judged.found += json.loads(kept.read_text())
                continue
            before = len(judged.found)
            cases = KINDS[kind](folder, random.Random(options.seed), options.count)
            cases = [case for case in cases if chance.random() < options.share]
            cases = [case for case in cases if options.only in case.text]
            judged.references = references(cases, folder / f"{kind}-ddp")
            run_series(
                [case.work for case in cases],
                folder / f"{kind}-runs",
                ranks=RANKS,
                seconds=MOST_SECONDS,
                has_begun=has_begun,
                tell=lambda index, end, cases=cases: judged.add(cases[index], end),
            )
            kept.write_text(json.dumps(judged.found[before:]))
            print(f"{kind}: {len(cases)} tried", flush=True)
    bad = sum(sample["verdict"] not in GOOD for sample in judged.found)
    print(f"{len(judged.found) - bad} of {len(judged.found)} inputs end well")
    if not options.dry:
        notes = (
            "Inputs of a training run on two processes, by what is wrong with them. Refused: on every rank before "
            "anything was trained, by an error that says a way out. Stopped: so while training. Trained: as DDP does, "
            f"within {TOLERANCE:g} in double precision. As DDP: the very error of DDP. Seed {options.seed}."
        )
        print(f"wrote {write_record(make_record('bad-runs', summary(judged.found), notes=notes))}")
    return int(bad > 0)


def summary(found: Sequence[Sample]) -> list[Sample]:
    """One row per family."""
    rows: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in found:
        rows[str(sample["kind"]), str(sample["family"])].append(sample)
    return [
        {
            "input": kind,
            "what_is_wrong": family,
            "inputs": len(members),
            **{name.replace(" ", "_"): sum(member["verdict"] == name for member in members) for name in GOOD},
            "median_seconds": median(float(str(member["seconds"])) for member in members),
        }
        for (kind, family), members in rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
