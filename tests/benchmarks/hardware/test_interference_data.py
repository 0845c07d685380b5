import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hardware.interference_data import ABOVE_SUM, affine, families, read_samples, table_machines

DATA = Path(__file__).parent / "data"
COLUMNS = ["compute_n", "gpu_gpu_mib", "h2d_mib", "d2h_mib", "world_size", "intra_group", "inter_group", "latency_ms"]


def write(path: Path, rows: list[list[float]], columns: list[str] = COLUMNS) -> Path:
    path.write_text(json.dumps({"name": "drawn", "columns": columns, "rows": rows}))
    return path


def row(
    compute: float, network: float, to_device: float, to_host: float, latency: float, group: tuple[int, int] = (8, 1)
) -> list[float]:
    return [compute, network, to_device, to_host, 8, *group, latency]


ALONE = [
    *[row(1000 * n, 0, 0, 0, 0.01 * n) for n in (1, 2, 4)],
    *[row(0, 100 * n, 0, 0, 0.002 + 0.02 * n) for n in (1, 2, 4)],
    *[row(0, 0, 60 * n, 0, 0.01 * n) for n in (1, 2, 4)],
    *[row(0, 0, 0, 60 * n, 0.01 * n) for n in (1, 2, 4)],
]


def test_loads_alone_come_from_latencies_and_rates(tmp_path: Path) -> None:
    machine = read_samples(write(tmp_path / "a.json", [*ALONE, row(3000, 300, 0, 120, 0.07)]))
    assert machine.times.loads[:, 0].tolist() == pytest.approx([0.03, 0.062, 0.0, 0.02], rel=1e-6)
    assert machine.times.seconds.tolist() == [0.07]
    assert machine.ways.tolist() == [3]
    assert machine.groups == ((8, 1),)


def test_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    columns = [*COLUMNS, "std_ms"]
    together = [
        [*row(1000, 0, 60, 0, 0.015), 0.0],
        [*row(1000, 0, 60, 0, 0.0), 0.0],
        [*row(1000, 0, 60, 0, 0.015), 0.01],
        [*row(1000, 0, 60, 0, 0.02 * ABOVE_SUM * 1.01), 0.0],
        [*row(1000, 100, 0, 0, 0.02, (8, 4)), 0.0],
    ]
    machine = read_samples(write(tmp_path / "a.json", [*[[*one, 0.0] for one in ALONE], *together], columns))
    assert machine.times.seconds.tolist() == [0.015]
    assert machine.left_out == {"alone_not_measured": 1, "zero": 1, "disturbed": 1, "above_sum": 1}


def test_latencies_in_milliseconds_are_told_from_seconds(tmp_path: Path) -> None:
    rows = [*ALONE, row(1000, 0, 60, 0, 0.015)]
    seconds = read_samples(write(tmp_path / "a.json", rows))
    milliseconds = read_samples(write(tmp_path / "b.json", [[*one[:-1], 1000 * one[-1]] for one in rows]))
    assert milliseconds.times.loads == pytest.approx(seconds.times.loads)
    assert milliseconds.times.seconds == pytest.approx(seconds.times.seconds)


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no columns latency_ms"):
        read_samples(write(tmp_path / "a.json", [one[:-1] for one in ALONE], COLUMNS[:-1]))
    with pytest.raises(ValueError, match="copies were not measured alone in both directions"):
        read_samples(write(tmp_path / "b.json", ALONE[:-3]))


def test_affine_fit_survives_rounding_and_has_no_negative_latency() -> None:
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    assert affine(sizes, 0.01 + 0.02 * sizes) == pytest.approx((0.01, 0.02))
    latency, rate = affine(sizes, np.round(0.0042 * sizes - 0.0005, 3))
    assert latency == 0.0
    assert rate == pytest.approx(0.0042, rel=0.1)


@pytest.mark.parametrize(
    ("name", "staged", "shared"),
    [("a100-sxm4-40gb", False, False), ("l4_template_machine", False, True), ("v100-sxm2-16gb", True, False)],
)
def test_kinds_of_measured_machines(name: str, staged: bool, shared: bool) -> None:
    machine = read_samples(DATA / f"{name}.json")
    assert (machine.staged, machine.shared) == (staged, shared)
    assert len(machine.times.seconds) > 100


def test_kinds_of_published_machines() -> None:
    machines = table_machines()
    assert {machine.family: (machine.staged, machine.shared) for machine in machines} == {
        "l4_template_machine": (False, True),
        "a100-sxm4-40gb": (False, False),
        "v100-sxm2-16gb": (True, False),
        "v100-sxm2-32gb": (False, False),
        "l4-readme": (True, True),
        "a10g": (False, True),
    }
    assert len(families(machines)) == 6
    for machine in machines:
        assert set(machine.ways.tolist()) == {2}
        sums = machine.times.loads.sum(axis=0)
        assert (machine.times.seconds <= ABOVE_SUM * sums + 1e-12).all()
        assert (machine.times.seconds >= machine.times.loads.max(axis=0) - 1e-12).all()
