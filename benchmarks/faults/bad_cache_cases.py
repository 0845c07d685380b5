"""Damaged files in the folder where measurements and plans are kept: each is left aside with a reason, or is harmless.

What is left aside is measured or planned again. A file that is damaged so that nobody can tell must at least give
numbers that are numbers: no prediction made of it is negative or not finite.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.small_fits import LAYERS, PLANS, RANKS
from benchmarks.faults.spoiling import WRONG, broken, places, with_value, without
from lightning_mist.cost import predict
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import (
    Cluster,
    Correction,
    HardwareProfile,
    MemoryRate,
    StepOverheads,
    catalog_profile,
    correction_store,
    detect,
    load_corrections,
    load_profile,
    save_corrections,
    save_profile,
)
from lightning_mist.strategy.planning.decision import cached_plan, remembered_limit, write_plan
from lightning_mist.strategy.planning.local_machine import rates_to_measure
from tests.specs import spec

OUT_OF_RANGE = (-1.0, 1e-300, 1e300, 5e-324, 2**62)


def _profile(machine: Cluster) -> HardwareProfile:
    """A profile that knows everything that one can know."""
    known = catalog_profile(machine)
    rate = MemoryRate(
        kind="elementwise",
        bytes=(1e5, 1e7),
        forward_bytes_per_second=(1e10, 5e9),
        backward_bytes_per_second=(1e10, 5e9),
        spread=0.01,
    )
    overheads = StepOverheads(step_seconds=1e-3, action_seconds=1e-4, message_seconds=1e-5)
    return replace(known, source="made up", rates=(rate,), overheads=overheads, host_to_device_bytes_per_second=1e10)


def _spoilt(good: Any, chance: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """What is wrong, and the text."""
    wrong: list[tuple[str, Any]] = []
    for path, value in places(good):
        if path and value is not None:
            wrong += [("a value", with_value(good, path, other)) for other in WRONG.get(type(value), ())]
            wrong.append(("a key that is missing", without(good, path)))
        if type(value) in (int, float):
            wrong += [("a number out of range", with_value(good, path, other)) for other in OUT_OF_RANGE]
        if isinstance(value, dict):
            wrong.append(("a key too many", with_value(good, (*path, "x y"), 1)))
        if isinstance(value, list) and value:
            wrong += [
                ("a list", with_value(good, path, other)) for other in ([], value + value, value[::-1], value[1:])
            ]
        if isinstance(value, str):
            wrong += [("a text", with_value(good, path, other)) for other in ("", "nn", "zzz", "float32", "x" * 5000)]
    for family in dict.fromkeys(name for name, _ in wrong):
        members = [document for name, document in wrong if name == family]
        for document in chance.sample(members, min(count, len(members))):
            yield family, json.dumps(document)
    for text in broken(json.dumps(good), chance):
        yield "a text that is no JSON", text


def _check(profile: HardwareProfile, machine: Cluster) -> None:
    """Fail unless what is predicted by a profile is made of numbers that can be seconds and bytes."""
    network = spec(LAYERS)
    for plan in PLANS.values():
        if plan.stages[0].mesh.tensor_parallel_degree > 1:
            continue  # of the network that is predicted for nobody knows how its layers could be shared out
        found = predict(network, profile, machine, replace(plan, predicted=None))
        for path, value in places(asdict(found)):
            if isinstance(value, float) and (
                not math.isfinite(value) or (value < 0 and path[-1] != "boundary_seconds")
            ):
                raise AssertionError(f"{value} predicted at {path}")


def _left_aside(reason: str | None) -> None:
    raise ProfileError("nothing was said of a file that is not used" if reason is None else reason)


def cache_works(folder: Path, chance: random.Random, count: int) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """What is wrong (its file and its family), and what reads the file as a fit does."""
    machine = detect(RANKS, 1, "cpu")
    good = _profile(machine)
    readers: Mapping[str, tuple[Path, Callable[[Path], None]]] = {
        "profiles": (save_profile(good, folder / "good", machine), lambda path: _read_profile(path, machine)),
        "corrections": _corrections(folder / "good", machine, good),
        "plans kept": (folder / "good" / "plans" / "0.json", _read_plan),
    }
    write_plan(PLANS["pp2"], readers["plans kept"][0])
    number = 0
    for name, (path, read) in readers.items():
        document = json.loads(path.read_text())
        texts: list[tuple[str, str | bytes]] = [*_spoilt(document, chance, count)]
        texts += [("bytes", content) for content in (b"\xff\xfe\x00\x01", b"\x80abc", bytes(range(256)))]
        for family, content in texts:
            number += 1
            yield name, family, _work(folder / str(number), path.relative_to(folder / "good"), content, read)
    limit = Path("plans") / "0.json"
    for text in ("", "x", "-5", "0", "1e9", "9" * 5000, "nan", "12 GiB", "\x00", "٣", " 7 ", "4096"):
        number += 1
        yield (
            "memory limits kept",
            "a text",
            _work(folder / str(number), limit.with_suffix(".limit"), text, _read_limit),
        )


def _work(folder: Path, name: Path, content: str | bytes, read: Callable[[Path], None]) -> Callable[[], Any]:
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def work() -> Any:
        read(folder)
        return {"whole": None}

    return work


def _read_profile(folder: Path, machine: Cluster) -> None:
    found, reason = load_profile(folder, machine, [torch.float32])
    if found is None:
        rates_to_measure(folder, machine, [torch.float32])
        _left_aside(reason)
    else:
        _check(found, machine)


def _corrections(folder: Path, machine: Cluster, profile: HardwareProfile) -> tuple[Path, Callable[[Path], None]]:
    known = [Correction(term=term, factor=1.2, ratios=(1.2, 1.2, 1.2)) for term in ("forward", "update")]
    store = correction_store(folder, machine, "64-true", profile)
    save_corrections(store, known)

    def read(place: Path) -> None:
        _, reason = load_corrections(correction_store(place, machine, "64-true", profile))
        if reason is not None:
            _left_aside(reason)

    return store.path, read


def _read_plan(folder: Path) -> None:
    plan, reason = cached_plan(folder / "plans" / "0.json", (("world_size", str(RANKS)), ("num_layers", str(LAYERS))))
    if plan is None:
        _left_aside(reason)


def _read_limit(folder: Path) -> None:
    limit = remembered_limit(folder / "plans" / "0.json")
    if limit is not None and limit < 1:
        raise AssertionError(f"a limit of {limit} bytes")
