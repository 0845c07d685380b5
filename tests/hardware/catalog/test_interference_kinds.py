import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.hardware import Cluster, Link, catalog_profile, parse_cluster
from lightning_mist.hardware.catalog.interference_kinds import (
    CAUSES,
    MEASURED,
    MEASURED_SPREAD,
    Causes,
    catalog_interference,
    copies_are_staged,
    interference_of_kind,
    lanes_are_shared,
)
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"
UNIT = st.floats(0.0, 1.0)
GIB = 2**30


@given(
    st.builds(
        Causes,
        base=st.tuples(*[UNIT] * len(COEFFICIENTS)),
        staged_compute=UNIT,
        staged_copies=UNIT,
        staged_network=UNIT,
        shared_copies=UNIT,
        shared_network=UNIT,
    )
)
def test_every_cause_makes_channels_take_turns_more(causes: Causes) -> None:
    plain = interference_of_kind(staged=False, shared=False, causes=causes)
    for staged, shared in ((True, False), (False, True), (True, True)):
        kind = interference_of_kind(staged=staged, shared=shared, causes=causes)
        for name in COEFFICIENTS:
            assert getattr(kind, name) >= getattr(plain, name) - 1e-12


def test_causes_are_combined_as_independent_ones() -> None:
    half = dict.fromkeys((field.name for field in dataclasses.fields(Causes) if field.name != "base"), 0.5)
    causes = Causes(base=(0.5,) * 9, **half)
    kind = interference_of_kind(staged=True, shared=True, causes=causes)
    assert kind.compute_network == kind.compute_across == 0.5
    assert kind.compute_to_device == kind.across_to_host == 0.75
    assert kind.network_to_device == kind.network_to_host == kind.to_device_to_host == 0.875


@pytest.mark.parametrize(("gib", "staged"), [(2.87, True), (4.14, True), (5.36, False), (5.75, False), (11.5, False)])
def test_slow_copies_are_staged(gib: float, staged: bool) -> None:
    assert copies_are_staged(gib * GIB) == staged


@pytest.mark.parametrize(
    ("network", "copy", "shared"),
    [(4.68, 5.75, True), (1.73, 11.5, True), (210.3, 5.4, False), (50.6, 5.75, False), (370.0, 50.0, False)],
)
def test_links_of_their_own_are_told_by_rates(network: float, copy: float, shared: bool) -> None:
    assert lanes_are_shared(network * GIB, copy * GIB) == shared


def test_constants_are_those_of_the_record() -> None:
    path = max(RECORDS.glob("interference_*.json"), key=lambda path: path.stem[-6:])
    rows = json.loads(path.read_text())["samples"]
    (causes,) = (row for row in rows if row["kind"] == "causes")
    for name, value in zip(COEFFICIENTS, CAUSES.base, strict=True):
        assert value == pytest.approx(causes[name], abs=0.0051)
    for name in ("staged_compute", "staged_copies", "staged_network", "shared_copies", "shared_network"):
        assert getattr(CAUSES, name) == pytest.approx(causes[name], abs=0.0051)
    names = {"A100-40": "a100-sxm4-40gb", "L4": "l4_template_machine", "V100-16": "v100-sxm2-16gb"}
    assert set(MEASURED) == set(MEASURED_SPREAD) == set(names)
    for device, machine in names.items():
        (own,) = (row for row in rows if row["kind"] == "own" and row["machine"] == machine)
        assert MEASURED_SPREAD[device] == pytest.approx(own["error"], abs=0.00051)
        for name, value in zip(COEFFICIENTS, MEASURED[device], strict=True):
            assert value == pytest.approx(own[name], abs=0.0051)


def described(text: str, gigabytes: float) -> Cluster:
    cluster = parse_cluster(text)
    link = Link(bytes_per_second=gigabytes * 1e9, latency_seconds=1e-5)
    return Cluster(num_nodes=1, devices_per_node=8, device=cluster.device, intra_node=link)


def test_catalog_devices() -> None:
    measured = catalog_interference(parse_cluster("1x8xL4"))
    assert measured is not None
    assert tuple(getattr(measured, name) for name in COEFFICIENTS) == MEASURED["L4"]
    assert measured.spread == MEASURED_SPREAD["L4"]
    free, shared = interference_of_kind(staged=False, shared=False), interference_of_kind(staged=False, shared=True)
    assert catalog_interference(parse_cluster("2x8xH100")) == free
    assert catalog_interference(parse_cluster("1x2xRTX4090")) == shared
    # A described link says more than what was measured over others.
    assert catalog_interference(described("1x8xL4", 300.0)) == free
    assert catalog_interference(described("1x8xH100", 30.0)) == shared
    assert catalog_interference(parse_cluster("1x2xcpu:8GiB")) is None


def test_catalog_profiles_have_it() -> None:
    for text in ("1x8xL4", "2x8xH100", "1x2xcpu:8GiB"):
        cluster = parse_cluster(text)
        assert catalog_profile(cluster).interference == catalog_interference(cluster)
