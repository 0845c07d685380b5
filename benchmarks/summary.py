"""What the package did for whom, in one line each: the README's table, made of records and of nothing else.

python -m benchmarks.summary
"""

from statistics import mean, median

from benchmarks.record import RECORDS, Sample, make_record, read_record, write_record
from lightning_mist.units import format_bytes, format_seconds


def _samples(name: str) -> list[dict]:
    return list(read_record(RECORDS / f"{name}.json").samples)


def _demo() -> Sample:
    (run,) = _samples("demo_amd-epyc-2-cores_202611")
    return {
        "for_whom": f"GPT, 2 CPU processes of {format_bytes(run['limit_bytes'])} (`make demo`)",
        "without_it": f"DDP needs {format_bytes(run['ddp_bytes'])}",
        "with_mist": f"trains in {format_bytes(run['measured_peak_bytes'])}; "
        f"losses within {run['largest_loss_difference']:.0e} of DDP's",
    }


def _capped_card() -> Sample:
    pairs = _samples("throughput-offload_1xh200_202611")
    (cap,) = {pair["cap_bytes"] for pair in pairs}
    (count,) = {pair["parameters"] for pair in pairs}
    ours, theirs = (mean(pair[f"{whose}_tokens_per_second"] for pair in pairs) for whose in ("mist", "rival"))
    return {
        "for_whom": f"GPT of {count / 1e9:.1f} billion, one H200 capped at {format_bytes(cap)}",
        "without_it": f"FSDP with CPU offload: {theirs:,.0f} tokens/s",
        "with_mist": f"{ours:,.0f} tokens/s",
    }


def _projects() -> Sample:
    found = _samples("projects_amd-epyc-2-cores_202611")
    same = sum(project["like DDP"] == "to the bit" for project in found)
    plain = sum(project["plan"] == "plain" for project in found)
    return {
        "for_whom": f"{len(found)} public Lightning projects, one word changed",
        "without_it": "values under DDP",
        "with_mist": f"the same to the bit in {same}; the plan is plain data parallelism in {plain}",
    }


def _bug_reports() -> Sample:
    found = _samples("public-bugs_amd-epyc-2-cores_202611")
    tries = [str(value) for report in found for name, value in report.items() if name not in ("of", "report", "title")]
    same = sum(value.startswith("same") for value in tries)
    refused = sum(value.startswith(("refused", "stopped")) for value in tries)
    return {
        "for_whom": f"{len(found)} public bug reports of distributed training, rebuilt",
        "without_it": "values under DDP",
        "with_mist": f"of {len(tries)} runs by 5 plans {same} the same, {refused} refused or stopped with a reason, "
        f"{len(tries) - same - refused} other",
    }


def _nothing_to_gain() -> Sample:
    pairs = _samples("throughput-against-ddp_amd-epyc-2-cores_202611")
    ours, ddp = (median(pair[f"{whose}_step_seconds"] for pair in pairs) for whose in ("mist", "ddp"))
    return {
        "for_whom": "small GPT for which DDP is the best plan",
        "without_it": f"DDP: {format_seconds(ddp)} a step",
        "with_mist": f"{format_seconds(ours)} a step",
    }


def samples() -> list[Sample]:
    """The lines, from the records that are committed."""
    return [_demo(), _capped_card(), _nothing_to_gain(), _projects(), _bug_reports()]


if __name__ == "__main__":
    NOTES = (
        "Each line is made of another record: docs/demo.md, offload.md, records.md, projects.md and uses.md have them."
    )
    print(write_record(make_record("summary", samples(), notes=NOTES)))
