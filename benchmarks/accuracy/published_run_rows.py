"""Training runs that others published with how long a step took: the rows of ``data/published_runs.json``.

A source has figures that all of its rows share, and columns. A row says the network, the machine, the batch, how it was
spread out, in which precision and with which kernels (``stack``), what it recomputed, and the figure as it was
published, in its unit. What else the program did, which may matter, is in ``beside`` and ``more``, in words.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy.published_rows import DATA

RUNS = DATA / "published_runs.json"
LONG = 8192
"""Tokens up to which a row is short."""

GB, GIB = 10**9, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run that somebody measured.

    Attributes:
        model: Name of its sizes.
        batch: Rows of an optimizer step over all devices.
        micro: Rows of a forward of a data-parallel rank.
        precision: In words; see :data:`~benchmarks.accuracy.published_replay.PRECISIONS`.
        recompute: ``"none"``, ``"full"`` (every layer), or what is recomputed, in words.
        stack: Whose kernels: ``"eager"``, ``"compiled"``, ``"fused"``, ...
        zero: What data-parallel ranks share out.
        chunks: Of the pipeline, on every device.
        torch: The version that ran, where operators have changed since.
        network: What a node sends to others, or a device of it, as said by the source.
        beside: What else the program did or the machine was.
        seconds: Of a step; None if the run ran out of memory.
        memory_bytes: Peak of memory, if it was published.
        memory_metric: Of what it is the peak.
    """

    id: str
    source: str
    model: str
    gpu: str
    nodes: int
    devices: int
    length: int
    micro: int
    batch: int
    precision: str
    recompute: str
    stack: str
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    network: str = ""
    torch: str = ""
    beside: tuple[str, ...] = ()
    seconds: float | None
    memory_bytes: int | None = None
    memory_metric: str = ""

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices

    @property
    def half(self) -> str:
        """Whether the row may be looked at while the model is made, or judges it: by a hash of its id."""
        return "fit" if hashlib.sha256(self.id.encode()).digest()[0] % 2 else "held out"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of run that it is one of, for biases."""
        tensor = f"tensor parallel {self.tensor}" if self.tensor > 1 else "no tensor parallelism"
        length = f"to {LONG} tokens" if self.length <= LONG else f"beyond {LONG} tokens"
        recompute = {"none": "kept", "full": "recomputed"}.get(self.recompute, "recomputed in part")
        return (self.gpu, self.stack, tensor, length, f"activations {recompute}", f"{self.gpu}, {self.stack}, {length}")


def read_runs(path: Path = RUNS) -> tuple[list[PublishedRun], dict[str, Mapping[str, Any]]]:
    """The rows, and sizes of networks by name.

    Raises:
        ValueError: If rows and columns do not match, an id is used twice, or a network has no sizes.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    runs = []
    for source in content["sources"]:
        for values in source["rows"]:
            if len(values) != len(source["columns"]):
                raise ValueError(f"{path}: {source['name']}: {values} for the columns {source['columns']}")
            runs.append(_run(source["name"], {**source["shared"], **dict(zip(source["columns"], values, strict=True))}))
    names = [run.id for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    unknown = sorted({run.model for run in runs} - set(content["models"]))
    if twice or unknown:
        raise ValueError(f"{path}: ids used twice: {twice}; networks without sizes: {unknown}")
    return runs, content["models"]


def _run(source: str, row: dict[str, Any]) -> PublishedRun:
    value, unit = row.pop("value"), row.pop("unit")
    beside = (*row.pop("beside", ()), *row.pop("more", ()))
    memory = [
        round(row.pop(f"memory_{name}") * size)
        for name, size in (("bytes", 1), ("gb", GB), ("gib", GIB))
        if row.get(f"memory_{name}") is not None
    ]
    left = {key: item for key, item in row.items() if not key.startswith("memory_") or key == "memory_metric"}
    left.pop("device_bytes", None)
    found = PublishedRun(**left, source=source, beside=beside, seconds=None, memory_bytes=next(iter(memory), None))
    return found if value is None else _timed(found, float(value), unit)


def _timed(run: PublishedRun, value: float, unit: str) -> PublishedRun:
    """With the seconds of a step, from a figure in its unit."""
    work = {
        "tokens/s": run.batch * run.length,
        "tokens/s/GPU": run.batch * run.length / run.world,
        "samples/s": run.batch,
    }
    if unit != "seconds" and unit not in work:
        raise ValueError(f"{run.id}: unit {unit!r}; known are seconds, {', '.join(work)}")
    return replace(run, seconds=value if unit == "seconds" else work[unit] / value)
