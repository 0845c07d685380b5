from dataclasses import replace

import pytest

from lightning_mist.hardware import ComputeRate, Interference, StepOverheads, catalog_profile, parse_cluster
from lightning_mist.hardware.profile.hardware_profile import Correction, KernelRate, MemoryRate
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS
from lightning_mist.hardware.profile_tables import render_profile

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


def test_memory_of_hosts_is_shown_where_it_was_measured():
    assert "host" not in render_profile(CLUSTER, PROFILE).splitlines()[0]
    shown = render_profile(replace(CLUSTER, host_memory_bytes=2**38), PROFILE).splitlines()[0]
    assert shown.startswith("2x4xL4, 22.5 GiB each, 256.0 GiB in each host: catalog")


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


def test_kinds_of_operators():
    kernel = KernelRate(
        kind="causal_attention",
        dtype="bfloat16",
        forward_flops_per_second=1e13,
        backward_flops_per_second=5e12,
        spread=0.01,
    )
    memory = MemoryRate(
        kind="reduction",
        bytes=(2**20, 2**24),
        forward_bytes_per_second=(1e10, 2e10),
        backward_bytes_per_second=(1e9, 3e9),
        spread=0.02,
    )
    correction = Correction(term="compute", factor=1.1, ratios=(1.1, 1.2))
    profile = replace(PROFILE, kernels=(kernel,), rates=(memory,), corrections=(correction,))
    shown = cells(render_profile(CLUSTER, profile))
    assert ["causal attention", "bfloat16", "10 TFLOP/s", "5 TFLOP/s", "1.0%"] in shown
    assert ["reduction", "1.0 MiB", "10 GB/s", "1 GB/s", "2.0%"] in shown
    assert ["", "16.0 MiB", "20 GB/s", "3 GB/s", ""] in shown
    assert ["compute", "1.100", "2"] in shown


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits(width):
    text = render_profile(CLUSTER, PROFILE, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("2x4xL4, 22.5 GiB each: catalog:")


def test_without_others_there_is_no_table_of_collectives():
    profile = replace(PROFILE, source="measured", collectives=())
    assert "collectives" not in render_profile(CLUSTER, profile)


def test_what_runs_together():
    coefficients = {**dict.fromkeys(COEFFICIENTS, 0.1), "compute_network": 0.25, "compute_to_host": 1.0}
    together = Interference(**coefficients, source="a fit", spread=0.05)
    text = render_profile(CLUSTER, replace(PROFILE, interference=together))
    assert "slowdown when running together (a fit; mean error 5.0%)" in text
    shown = cells(text)
    assert ["computation and communication in a node", "25%"] in shown
    assert ["computation and copies to the host", "100%"] in shown
    assert sum(row[1:] == ["10%"] for row in shown) == len(COEFFICIENTS) - 2  # every one in words
    assert "running together" not in render_profile(CLUSTER, replace(PROFILE, interference=None))


def test_overheads_that_were_measured():
    overheads = StepOverheads(step_seconds=2e-3, action_seconds=1e-4)
    shown = cells(render_profile(CLUSTER, replace(PROFILE, overheads=overheads)))
    assert ["overhead per step", "2 ms"] in shown
    assert ["overhead per forward or backward", "100 us"] in shown
    assert "overhead per message" not in str(shown)
