"""The simulated caching allocator against torch's own, request by request, on a machine with a CUDA device.

    python -m benchmarks.accuracy.allocator_on_cuda
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks.accuracy.allocator_on_cuda --expandable
    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 python -m benchmarks.accuracy.allocator_on_cuda --max-split-mib 64

Random requests on two streams are made of both. What torch's statistics say must be what the simulation says, to the
byte: peaks of requested, allocated, active and reserved bytes, and how often memory was given back at the capacity.
"""

import argparse
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.accuracy.allocator_streams import StreamEvent, simulated
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings

MIB = 2**20
STREAMS = ("compute", "side")
SIZES = (100, 4_000, 70_000, MIB, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB, 75 * MIB)
FIGURES = ("requested", "allocated", "active", "reserved")


def random_events(seed: int, count: int, most_alive: int = 60) -> list[StreamEvent]:
    """Requests of all size classes; some memory is used by the other stream, which has finished when it is freed."""
    draw = random.Random(seed)
    events: list[StreamEvent] = []
    alive: dict[int, str] = {}
    for name in range(count):
        while alive and (len(alive) > most_alive or draw.random() < 0.45):
            gone = draw.choice(list(alive))
            other = STREAMS[alive.pop(gone) == STREAMS[0]]
            if draw.random() < 0.2:
                events.append(StreamEvent("use", gone, stream=other))
                events += [StreamEvent("free", gone), StreamEvent("finish", stream=other)]
            else:
                events.append(StreamEvent("free", gone))
        stream = draw.choices(STREAMS, (3, 1))[0]
        size = max(1, int(draw.choice(SIZES) * draw.uniform(0.7, 1.3)))
        events.append(StreamEvent("malloc", name, size, stream))
        alive[name] = stream
    return events


def play(events: Sequence[StreamEvent], capacity: int | None) -> dict[str, int]:
    """What torch's statistics say after the events on the current CUDA device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if capacity is None else capacity / total)
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    streams = {name: torch.cuda.Stream() for name in STREAMS}
    alive: dict[int, Tensor] = {}
    ran = 0
    for event in events:
        if event.kind == "malloc":
            with torch.cuda.stream(streams[event.stream]):
                try:
                    alive[event.identity] = torch.empty(event.nbytes, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    break
        elif event.kind == "free":
            del alive[event.identity]
        elif event.kind == "use":
            alive[event.identity].record_stream(streams[event.stream])
        else:
            streams[event.stream].synchronize()
        ran += 1
    statistics: Mapping[str, int] = torch.cuda.memory_stats()
    found = {name: statistics[f"{name}_bytes.all.peak"] for name in FIGURES}
    return {**found, "flushes": statistics["num_alloc_retries"] - retries, "events": ran}


def main() -> None:
    """Compare many traces, with and without a capacity, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=40)
    parser.add_argument("--events", type=int, default=600)
    parser.add_argument("--expandable", action="store_true")
    parser.add_argument("--max-split-mib", type=int)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: what torch's allocator does can only be seen on one")
    samples: list[Sample] = []
    for seed in range(options.traces):
        events = random_events(seed, options.events)
        # Expandable segments are limited by the device alone, which nobody fills for this.
        capacity = None if seed % 2 == 0 or options.expandable else 1200 * MIB
        settings = AllocatorSettings(
            capacity_bytes=capacity,
            expandable_segments=options.expandable,
            max_split_bytes=options.max_split_mib and options.max_split_mib * MIB,
        )
        told, seen = simulated(events, settings), play(events, capacity)
        samples.append(
            {
                "seed": seed,
                "capacity_bytes": capacity,
                **{f"simulated_{name}": value for name, value in told.items()},
                **{f"measured_{name}": value for name, value in seen.items()},
                "equal": told == seen,
            }
        )
    equal = sum(bool(sample["equal"]) for sample in samples)
    notes = f"{equal} of {len(samples)} traces equal; torch {torch.__version__}, expandable {options.expandable}."
    print(notes, *(sample for sample in samples if not sample["equal"]), sep="\n")
    theme = (
        "allocator-expandable" if options.expandable else "allocator-split" if options.max_split_mib else "allocator"
    )
    print(write_record(make_record(theme, samples, notes=notes)))


if __name__ == "__main__":
    main()
