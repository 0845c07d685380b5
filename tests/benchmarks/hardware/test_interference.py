from pathlib import Path

import numpy as np
import pytest

from benchmarks.hardware.interference import (
    causes_of,
    chosen,
    coefficients,
    errors,
    evaluate,
    prior_spread,
    training,
)
from benchmarks.hardware.interference_data import Machine, read_samples, table_machines
from lightning_mist.hardware.catalog.interference_kinds import interference_of_kind
from lightning_mist.hardware.measure.device_bench import fit_interference, predicted_seconds

DATA = Path(__file__).parent / "data"
NAMES = ("a100-sxm4-40gb", "l4_template_machine", "v100-sxm2-16gb")


@pytest.fixture(scope="module", params=NAMES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return read_samples(DATA / f"{request.param}.json")


def test_a_quick_calibration_predicts_the_rest(machine: Machine) -> None:
    prior = interference_of_kind(staged=machine.staged, shared=machine.shared)
    few = chosen(machine, 18)
    found = fit_interference(machine.times.pick(few), prior, "test")
    times = machine.times
    row = errors(machine, predicted_seconds(times, found), few)
    simple = [errors(machine, predicted, few) for predicted in (times.loads.sum(axis=0), times.loads.max(axis=0))]
    # What a machine's own calibration is meant to reach, with room for the few samples that are kept here.
    assert float(row["error"] or 1) < 0.09
    assert float(row["error"] or 1) < 0.7 * min(float(other["error"] or 0) for other in simple)
    assert row["scored"] == len(machine.groups) - 18


def test_samples_are_chosen_by_what_runs_together(machine: Machine) -> None:
    few = chosen(machine, 25)
    assert len(set(few.tolist())) == 25
    active = {tuple(column) for column in (machine.times.loads[:, few] > 0).T.tolist()}
    assert len(active) == 11
    times = machine.times
    longer = Machine(
        **{
            **{name: getattr(machine, name) for name in machine.__dataclass_fields__},
            "times": type(times)(loads=times.loads, seconds=2 * times.seconds, across_nodes=times.across_nodes),
        }
    )
    assert chosen(longer, 25).tolist() == few.tolist()
    assert len(chosen(machine, 10**6)) == len(machine.groups)


def test_rows_of_a_machine(machine: Machine) -> None:
    prior = interference_of_kind(staged=machine.staged, shared=machine.shared)
    rows = evaluate(machine, prior)
    assert [row["kind"] for row in rows] == ["machine", "serial", "free", "left_out", "own", *["quick"] * 6]
    own, left_out = rows[4], rows[3]
    # The prior knows these machines already; a third of few samples must not lead away from it.
    assert float(own["error"] or 1) <= 1.05 * float(left_out["error"] or 0)
    assert left_out["scored"] == len(machine.groups)
    spread = prior_spread(rows)
    numbers = 9 if "across_error" in own else 6
    assert spread["scored"] == numbers
    assert 0 < float(spread["root_mean_square"] or 0) < 0.5


def test_no_family_teaches_itself() -> None:
    machines = [*(read_samples(DATA / f"{name}.json") for name in NAMES), *table_machines()]
    everything = training(machines, None)
    assert {machine.family for machine in everything if not machine.is_table} == set(NAMES)
    assert {machine.family for machine in everything if machine.is_table} == {"v100-sxm2-32gb", "l4-readme", "a10g"}
    for machine in everything:
        assert machine.family not in {other.family for other in training(machines, machine.family)}


def test_errors_are_means_of_what_is_scored() -> None:
    machine = read_samples(DATA / "a100-sxm4-40gb.json")
    predicted = machine.times.seconds * np.where(machine.ways == 2, 1.1, 0.8)
    predicted[0] = 1e9
    row = errors(machine, predicted, np.array([0]))
    assert row["2_channels_error"] == pytest.approx(0.1)
    assert row["3_channels_error"] == row["4_channels_error"] == pytest.approx(0.2)
    assert row["scored"] == len(machine.groups) - 1
    assert 0.1 < float(row["error"] or 0) < 0.2


def test_causes_of_a_vector() -> None:
    causes = causes_of(np.linspace(-0.1, 1.2, 14))
    assert causes.base[0] == 0.0
    assert causes.shared_network == 1.0
    kind = interference_of_kind(staged=False, shared=False, causes=causes)
    assert tuple(coefficients(kind).values()) == causes.base
