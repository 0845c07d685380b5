"""Two hosts in network namespaces, joined by a slow link: which plan is chosen, what it takes, and how it ends.

On each host two processes, started by torchrun. At several rates of the link the strategy measures, plans and trains a
model of many parameters and few activations; DDP trains it, too. Then one host's processes are killed while training,
or the cable is pulled, and it is seen when and with what words the other host's end. Needs root, ``ip`` and ``tc``.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from benchmarks.record import Sample, make_record, write_record
from lightning_mist.hardware import HardwareProfile, read_machine
from lightning_mist.plan import Plan, from_json
from lightning_mist.plan.plan_text import recipe_of
from tests.hosts import Host, Hosts, Signpost, crossings, hosts_of_stages, kill, two_hosts, why_not
from tests.integration import hosts_worker

RATES = ("100mbit", "1gbit")
LONGEST_SECONDS = 900.0
"""What a run may take on a busy machine."""

HARMS = ("host 0 is killed", "host 1 is killed", "the cable is pulled")
SAID = r"its process has ended without a word|Connection closed by peer|Connection reset by peer|[^\n]*timed out[^\n]*"


def rates_of(profile: HardwareProfile) -> Sample:
    """What two processes send to each other, on one host and over the link."""
    found: Sample = {}
    for name, nodes in (("within", 1), ("between", 2)):
        (cost,) = [
            cost
            for cost in profile.collectives
            if (cost.operation, cost.group_size, cost.num_nodes) == ("send_recv", 2, nodes)
        ]
        found[f"{name}_bytes_per_second"] = cost.bytes_per_second
    return found


def is_cut_at_the_link(plan: Plan, places: list[str]) -> bool:
    """Whether every stage lies on one host, and one boundary between stages on the link."""
    return all(len(hosts) == 1 for hosts in hosts_of_stages(plan, places)) and crossings(plan, places) == 1


def train(hosts: Hosts, folder: Path, strategy: str, steps: int) -> dict[str, list[float]]:
    """What rank 0 writes of a fit on both hosts.

    Raises:
        RuntimeError: If it fails.
    """
    with hosts.running(folder, hosts_worker.__name__, [str(folder), strategy, str(steps)]) as running:
        if running.codes(LONGEST_SECONDS) != [0, 0]:
            raise RuntimeError(running.output())
    found: dict[str, list[float]] = json.loads((folder / f"{strategy}.json").read_text(encoding="utf-8"))
    return found


def fit(folder: Path, rate: str, steps: int) -> Sample:
    """One rate of the link: measured rates, the plan, its step and DDP's."""
    folder.mkdir()
    with two_hosts(folder, rate) as hosts:
        ours, theirs = (train(hosts, folder, strategy, steps) for strategy in ("mist", "ddp"))
        plan = from_json((folder / "plan.json").read_text(encoding="utf-8"))
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    predicted, measured = (float(report[f"{name}_step_seconds"]) for name in ("predicted", "measured"))
    plain = statistics.median(after - before for before, after in pairwise(theirs["ends"]))
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return {
        "kind": "fit",
        "link": rate,
        **rates_of(_profile(folder)),
        "plan": recipe_of(plan),
        "cut_at_the_link": is_cut_at_the_link(plan, [str(place) for place in ours["hosts"]]),
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured,
        "time_error": predicted / measured - 1,
        "ddp_step_seconds": plain,
        "largest_loss_difference": difference,
    }


def _profile(folder: Path) -> HardwareProfile:
    """What was measured: the only profile there."""
    (path,) = (folder / "profiles").glob("profile-*.json")
    return read_machine(path)[1]


def end(hosts: Hosts, folder: Path, measured: Path, harm: str) -> Sample:
    """Train by what was measured before until the harm comes, and see how the other host ends."""
    shutil.copytree(measured / "profiles", folder / "profiles")
    signpost = Signpost(folder / hosts_worker.TRAINING)
    with hosts.running(folder, hosts_worker.__name__, [str(folder), "mist", "1000000"]) as running:
        if not running.come_to(signpost, LONGEST_SECONDS):
            raise RuntimeError(running.output())
        harmed = time.monotonic()
        left = _harm(hosts, harm)
        codes = [running.started[host.node].wait(LONGEST_SECONDS) for host in left]
        seconds = time.monotonic() - harmed
    said = {match for host in left for match in re.findall(SAID, running.logs[host.node].read_text())}
    return {"kind": "end", "harm": harm, "end_seconds": seconds, "codes": str(codes), "said": "; ".join(sorted(said))}


def _harm(hosts: Hosts, harm: str) -> tuple[Host, ...]:
    """Do it; the hosts that are left."""
    if harm == HARMS[2]:
        hosts.pull_cable()
        return hosts.both
    first, second = hosts.both if harm == HARMS[0] else reversed(hosts.both)
    kill(first)
    return (second,)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run everything, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the link, as tc reads them")
    parser.add_argument("--steps", type=int, default=30, help="of each fit")
    given = parser.parse_args(None if arguments is None else list(arguments))
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if (reason := why_not(folder)) is not None:
            print(f"there cannot be two hosts here: {reason}", file=sys.stderr)
            return 2
        for rate in given.rates:
            samples.append(fit(folder / rate, rate, given.steps))
            print(samples[-1], flush=True)
        for number, harm in enumerate(HARMS):
            with two_hosts(folder, given.rates[0]) as hosts:
                samples.append(end(hosts, folder / f"harm{number}", folder / given.rates[0], harm))
            print(samples[-1], flush=True)
    notes = (
        "Two hosts are network namespaces of one machine with two processes each, and share its cores; tc limits the "
        "link between them in each direction. Rates: what two processes send to each other, as the strategy measured. "
        "Ends: seconds from the harm to the exit of torchrun on the hosts that are left, and what they print."
    )
    print(write_record(make_record("two-hosts", samples, notes=notes)))
    return int(not all(sample.get("cut_at_the_link", True) for sample in samples))


if __name__ == "__main__":
    sys.exit(main())
