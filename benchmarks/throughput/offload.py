"""Tokens per second of models that a card does not hold, against other ways to train them there.

Models of 2.7 and 7 billion parameters, made from configurations with random weights, in one process under caps of a
card's memory (``torch.cuda.set_per_process_memory_fraction``): by the plan that mist chooses; by mist with every layer
recomputed and nothing moved; by Lightning's FSDP with CPU offload; and by DeepSpeed's ZeRO-Offload, where it is
installed. The last two recompute every layer too. Every run is a process of its own. Runs of a pair follow each other,
in turns which first, and give one ratio of tokens per second. Out of memory is a result.

    python -m benchmarks.throughput.offload
    python -m benchmarks.throughput.offload --sizes 2.7b --caps 24 --pairs 1
    python -m benchmarks.throughput.offload --device cpu --sizes tiny tiny-llama --rows 2 --length 16 --pairs 1

The last one tries the program where there is no card: nothing is capped, and nothing is recorded.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import NO_CARD
from benchmarks.launch import run_module
from benchmarks.record import RECORDS, Sample, make_record, write_record
from benchmarks.throughput.offload_run import SIZES, STRATEGIES, add_arguments

OURS, *RIVALS = STRATEGIES

_FIGURES = ("step_seconds", "tokens_per_second", "device_peak_bytes", "host_peak_bytes", "first_loss", "last_loss")
_WORDS = ("ended", "error", "plan")

Run = dict[str, Any]


def arguments_of(options: argparse.Namespace, size: str, cap: float | None, strategy: str) -> list[str]:
    """The command line of one run."""
    common = {name: getattr(options, name) for name in ("device", "rows", "length", "steps", "precision")}
    values = {**common, "size": size, "strategy": strategy, "cap": cap}
    return [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]


def run(options: argparse.Namespace, size: str, cap: float | None, strategy: str) -> Run:
    """One run in a process of its own, however it ends."""
    # Whoever updates in host memory has all cores.
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} if options.device == "cuda" else {}
    try:
        return run_module(
            "benchmarks.throughput.offload_run",
            arguments_of(options, size, cap, strategy),
            processes=1,
            timeout_seconds=options.timeout,
            environment=threads,
        )
    except RuntimeError as error:
        text = str(error)
        if "was killed" in text.partition("\n")[0]:
            return {"ended": "out of time", "error": f"{options.timeout:.0f} s were over"}
        # The kernel ends who takes more host memory than there is.
        return {"ended": "killed" if "SIGKILL" in text else "failed", "error": text[-600:]}


def sample_of(pair: int, size: str, cap: float | None, rival: str, ours: Run, theirs: Run) -> Sample:
    """One row: what came of both, and the ratio if both trained."""
    both = ours.get("tokens_per_second"), theirs.get("tokens_per_second")
    sample: Sample = {
        "pair": pair,
        "model": size,
        "parameters": ours.get("parameters") or theirs.get("parameters"),
        "cap_bytes": None if cap is None else int(cap * 2**30),
        "rival": rival,
        "ratio": both[0] / both[1] if both[0] and both[1] else None,
    }
    for name, found in (("mist", ours), ("rival", theirs)):
        sample |= {f"{name}_{key}": found.get(key) for key in (*_WORDS, *_FIGURES)}
    return sample


def pairs_of(options: argparse.Namespace) -> Iterator[Sample]:
    """All pairs of all models and caps; what did not train once is not tried again."""
    for size in options.sizes:
        for cap in options.caps:
            known: dict[str, Run] = {}

            def tried(strategy: str, size: str = size, cap: float | None = cap, known: dict[str, Run] = known) -> Run:
                if strategy in known:
                    return known[strategy]
                found = run(options, size, cap, strategy)
                if found["ended"] != "trained":
                    known[strategy] = found
                return found

            for pair in range(options.pairs):
                for rival in options.rivals:
                    found = {name: tried(name) for name in ((OURS, rival) if pair % 2 == 0 else (rival, OURS))}
                    yield sample_of(pair, size, cap, rival, found[OURS], found[rival])


def summary(samples: Sequence[Sample]) -> list[str]:
    """Per model, cap and rival in a line: the median ratio and its range, or how the runs ended."""
    lines = []
    for size, cap, rival in dict.fromkeys((s["model"], s["cap_bytes"], s["rival"]) for s in samples):
        these = [s for s in samples if (s["model"], s["cap_bytes"], s["rival"]) == (size, cap, rival)]
        ratios = [float(ratio) for s in these if (ratio := s["ratio"]) is not None]
        where = f"{size}" if cap is None else f"{size} under {int(cap) / 2**30:g} GiB"
        ended = "; ".join(dict.fromkeys(f"mist: {s['mist_ended']}, {rival}: {s['rival_ended']}" for s in these))
        figures = f"{statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}" if ratios else ended
        lines.append(f"{where}, mist over {rival}: {figures}")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with what the device says left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["2.7b", "7b"])
    parser.add_argument("--caps", nargs="+", type=float, default=[24.0, 40.0], help="GiB of the card")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one run")
    parser.add_argument("--records", type=Path, help="folder of the record")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        options.caps = [None]
        return options
    options.records = options.records or RECORDS
    if options.precision is None and torch.cuda.is_available():
        options.precision = "bf16-true" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return options


def main() -> None:
    """Run the pairs, print the ratios, write the record."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(NO_CARD)
    samples = []
    for sample in pairs_of(options):
        samples.append(sample)
        print(sample, flush=True)
    lines = summary(samples)
    print(*lines, sep="\n")
    if options.records is not None:
        notes = (
            f"{options.precision or '32-true'}, {options.rows} rows of {options.length} tokens. "
            + ". ".join(lines)
            + "."
        )
        print(write_record(make_record("throughput-offload", samples, notes=notes), options.records))


if __name__ == "__main__":
    main()
