"""How the seconds of a search grow with layers and with devices, drawn from the record.

OMP_NUM_THREADS=1 python -m benchmarks.planner.growth
python -m benchmarks.planner.growth --draw

The first searches, writes the record and draws docs/planner-growth.svg from it; the second only draws. Each search is
what ``lightning-mist plan`` searches by default, in a new process, for GPT-3's block of 6.7B (hidden size 4096) on
nodes of eight H100.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.planner.apart import PRECISION, Question, ask_apart, spec_of
from benchmarks.record import RECORDS, ROOT, Record, Sample, make_record, read_record, write_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.plan import SearchSpace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEME = "planner-growth"
PICTURE = ROOT / "docs" / "planner-growth.svg"

LAYERS, DEVICES = (24, 32, 48, 64, 80, 96), (8, 16, 32, 64, 128, 256, 512)
FIXED_LAYERS, FIXED_DEVICES, BATCH, LENGTH = 48, 32, 1024, 2048
"""What stays the same while the other grows; rows over all devices and tokens per row."""


def searched(layers: int, devices: int, grows: str) -> Sample:
    """One search."""
    name = f"{devices // 8}x8xH100"
    world = parse_cluster(name).world_size
    shape = replace(PRESETS["gpt3-7b"], layers=layers)
    spec = spec_of(shape, f"{layers} layers", name, rows=BATCH // world, sequence_length=LENGTH)
    session = ask_apart(spec, name, (Question(global_batch_size=BATCH),), SearchSpace())
    reply = session.replies[0]
    return {
        "grows": grows,
        "layers": layers,
        "devices": devices,
        "search_seconds": reply.seconds,
        "rise_bytes": reply.peak_bytes - session.before_bytes,
        "candidates": reply.candidates,
        "status": reply.status,
        "gap": reply.gap,
        "stages": reply.stages,
    }


def draw(record: Record, path: Path) -> None:
    """The picture of a record."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": THEME, "svg.fonttype": "none", "font.size": 11}):
        figure, panels = pyplot.subplots(1, 2, figsize=(9.0, 3.4), sharey=True, layout="constrained")
        _panel(panels[0], [item for item in record.samples if item["grows"] == "layers"], "layers")
        _panel(panels[1], [item for item in record.samples if item["grows"] == "devices"], "devices")
        panels[0].set_ylabel("seconds of a search")
        panels[0].set_title(f"{FIXED_DEVICES} devices", fontsize=11)
        panels[1].set_title(f"{FIXED_LAYERS} layers", fontsize=11)
        panels[1].set_xscale("log", base=2)
        panels[1].set_xticks(DEVICES, [str(count) for count in DEVICES])
        panels[0].set_xticks(LAYERS)
        # The panels share this axis, which must reach to the slowest search of both.
        panels[0].set_ylim(0.0, 1.05 * max(float(item["search_seconds"] or 0.0) for item in record.samples))
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _panel(axes: "Axes", samples: Sequence[Sample], name: str) -> None:
    axes.plot(
        [item[name] for item in samples],
        [item["search_seconds"] for item in samples],
        marker="o",
        color="#0072B2",  # Blue of Okabe and Ito's palette, which the colour-blind tell apart.
    )
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Search and draw, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the latest record")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, help="multiples of 8")
    parser.add_argument("--dry-run", action="store_true", help="write no record and no picture")
    options = parser.parse_args()
    if not options.draw:
        points = [(layers, FIXED_DEVICES, "layers") for layers in options.layers]
        points += [(FIXED_LAYERS, devices, "devices") for devices in options.devices]
        samples = []
        for point in points:
            samples.append(searched(*point))
            print(samples[-1], flush=True)
        notes = (
            f"One search per row, each in a new process; {PRECISION}, {LENGTH} tokens per row, {BATCH} rows over all "
            "devices, AdamW. Rise: resident memory above that before the search."
        )
        if options.dry_run:
            return
        print(write_record(make_record(THEME, samples, notes=notes)))
    latest = max(RECORDS.glob(f"{THEME}_*.json"), key=lambda path: path.stem[-6:])
    draw(read_record(latest), PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
