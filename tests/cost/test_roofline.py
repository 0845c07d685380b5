import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.cost import MemoryModel, predict, roofline
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.model.spec.polynomial import MICROBATCH
from tests.cost.memory.test_memory_model import make_plan
from tests.specs import cluster, moved_bytes, profile, spec

MACHINE = profile(flops_per_second=1e10, bytes_per_second=1e9)


def step_work(network, machine, devices, rows):
    return roofline.step_work(MemoryModel(network), ((machine, devices.world_size),), rows)


def test_work_of_a_step():
    network = spec(3)
    work = step_work(network, MACHINE, cluster(2), 4)
    # Head, three layers and tail of 1e8 FLOPs per row and twice that in backward.
    parts = (network.head, *network.layers * 3, network.tail)
    flops = sum(float((part.forward_flops + part.backward_flops).subs(MICROBATCH, 4)) for part in parts)
    assert work.model_flops == pytest.approx(flops)
    assert work.peak_flops_per_second == max(MACHINE.compute[0].flops_per_second)
    assert work.peak_source == "the fastest float32 matrix product measured"
    assert work.sequence_length == network.sequence_length


def test_the_roofline_is_the_longer_of_computing_and_moving():
    network = spec(1)
    bytes_of_update = 9.0 * sum(item.bytes for item in network.parameters)
    computing = step_work(network, replace(MACHINE, memory_bytes_per_second=1e18), cluster(1), 2)
    assert computing.roofline_seconds == pytest.approx(computing.model_flops / 1e10, rel=1e-3)
    moving = step_work(network, replace(MACHINE, memory_bytes_per_second=1.0), cluster(1), 2)
    parts = (network.head, *network.layers, network.tail)
    moved = sum(float(moved_bytes((*part.forward_work, *part.backward_work)).subs(MICROBATCH, 2)) for part in parts)
    assert moving.roofline_seconds == pytest.approx(moved + bytes_of_update)
    shared = step_work(network, replace(MACHINE, memory_bytes_per_second=1.0), cluster(4), 2)
    assert shared.roofline_seconds == pytest.approx(moving.roofline_seconds / 4)


def test_peaks_of_the_data_sheet_come_first():
    machine = parse_cluster("2xL4")
    known = catalog_profile(machine)
    slow = tuple(replace(rate, flops_per_second=tuple(1.0 for _ in rate.flops)) for rate in known.compute)
    work = step_work(spec(2, precision="bf16-mixed"), replace(known, compute=slow), machine, 4)
    assert (work.peak_flops_per_second, work.peak_source) == (121e12, "bfloat16 in the data sheet of L4")


def test_processors_of_the_catalog_have_no_data_sheet():
    machine = parse_cluster("2xcpu:8GiB")
    work = step_work(spec(2), catalog_profile(machine), machine, 4)
    assert work.peak_source == "the fastest float32 matrix product of the catalog"
    assert work.peak_flops_per_second == max(catalog_profile(machine).compute[0].flops_per_second)


@pytest.mark.parametrize(
    ("precision", "source"),
    [("64-true", "nothing says how fast .* computes in float64"), ("nf4", "precision 'nf4': the element type")],
)
def test_a_peak_that_nobody_knows_is_said(precision, source):
    work = step_work(spec(2, precision=precision), MACHINE, cluster(1), 4)
    assert work.peak_flops_per_second == 0.0
    assert re.match(source, work.peak_source)
    assert work.roofline_seconds > 0  # of memory alone


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
)
def test_no_plan_of_a_described_machine_is_below_its_roofline(layers, zero, degree, microbatches, rows):
    machine = parse_cluster(f"{len(layers) * degree}xL4")
    plan = make_plan(layers, degree=degree, microbatches=microbatches, rows=rows, zero=zero if degree > 1 else 0)
    network = spec(sum(layers), precision="bf16-mixed")
    predicted = predict(network, catalog_profile(machine), machine, plan)
    assert 0 < predicted.work.roofline_seconds <= predicted.step_seconds
    assert (
        predicted.work.model_flops
        == step_work(network, catalog_profile(machine), machine, plan.global_batch_size).model_flops
    )
