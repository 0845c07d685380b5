from dataclasses import replace

import pytest

from lightning_mist.hardware import ComputeRate, Interference, StepOverheads, catalog_profile, parse_cluster
from lightning_mist.hardware.render import render_profile

CLUSTER = parse_cluster("2x4xL4")
PROFILE = catalog_profile(CLUSTER)


def cells(text):
    rows = [line for line in text.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.replace("┃", "│").split("│")[1:-1]] for row in rows]


def test_matrix_products_by_size_and_type():
    rates = (
        ComputeRate(dtype="float32", flops=(2 * 64**3, 2 * 128**3), flops_per_second=(1e9, 2.5e9), spread=0.02),
        ComputeRate(dtype="bfloat16", flops=(2 * 128**3,), flops_per_second=(5e12,), spread=0.1),
    )
    assert cells(render_profile(CLUSTER, replace(PROFILE, compute=rates)))[:4] == [
        ["edge", "float32", "bfloat16"],
        ["64", "1 GFLOP/s", ""],
        ["128", "2.5 GFLOP/s", "5 TFLOP/s"],
        ["spread", "2.0%", "10.0%"],
    ]


def test_memory_launches_and_copies():
    profile = replace(PROFILE, memory_bytes_per_second=235e9, operator_seconds=7.3e-6)
    shown = cells(render_profile(CLUSTER, profile))
    assert ["memory, read and written", "235 GB/s"] in shown
    assert ["launch of an operator", "7.3 us"] in shown
    assert any(row[0] == "copies, host to device" for row in shown)
    assert "copies, " not in render_profile(CLUSTER, catalog_profile(parse_cluster("2xcpu:1GiB")))


def test_collectives_by_group():
    shown = cells(render_profile(CLUSTER, PROFILE))
    wanted = [cost for cost in PROFILE.collectives if (cost.operation, cost.group_size) == ("all_reduce", 8)]
    assert len(wanted) == 1
    (found,) = [row for row in shown if row[:3] == ["all_reduce", "8", "2"]]
    assert found[3:] == ["1.3 ms", found[4], "0.0%"]


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits(width):
    text = render_profile(CLUSTER, PROFILE, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("2x4xL4, 22.5 GiB each: catalog:")


def test_without_others_there_is_no_table_of_collectives():
    profile = replace(PROFILE, source="measured", collectives=())
    assert "collectives" not in render_profile(CLUSTER, profile)


def test_what_runs_together():
    together = Interference(
        compute_network=0.25,
        compute_to_device=0.0,
        compute_to_host=1.0,
        to_device_to_host=0.5,
        network_to_device=0.1,
        network_to_host=0.1,
        across_to_device=0.1,
        across_to_host=0.1,
        source="a fit",
        spread=0.05,
    )
    text = render_profile(CLUSTER, replace(PROFILE, interference=together))
    assert "slowdown when running together (a fit; mean error 5.0%)" in text
    shown = cells(text)
    assert ["computation and communication", "25%"] in shown
    assert ["computation and copies to the host", "100%"] in shown
    assert "running together" not in render_profile(CLUSTER, replace(PROFILE, interference=None))


def test_overheads_that_were_measured():
    overheads = StepOverheads(step_seconds=2e-3, action_seconds=1e-4)
    shown = cells(render_profile(CLUSTER, replace(PROFILE, overheads=overheads)))
    assert ["overhead of a step", "2 ms"] in shown
    assert ["overhead of a forward or backward", "100 us"] in shown
    assert "overhead of a message" not in str(shown)
