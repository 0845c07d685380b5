import json
from dataclasses import replace

import pytest

from lightning_mist.errors import InfeasibleError
from lightning_mist.explain import fitting
from lightning_mist.hardware import Correction, correction_store, factor_of, load_corrections, save_corrections
from lightning_mist.plan import load
from lightning_mist.plan.plan_text import short_name
from lightning_mist.strategy.monitoring.profile_corrections import (
    LEAST_GAIN,
    LEAST_STEPS,
    QUICK_SECONDS,
    Basis,
    Learner,
    with_corrections,
)
from lightning_mist.strategy.monitoring.stage_times import Measured, StageTimes, predicted_times
from lightning_mist.tuner import SearchSpace
from tests.explain.test_fitting import needing
from tests.specs import cluster, profile, spec

SEARCH = SearchSpace(num_stages=(1, 2), num_microbatches=(4,), schedules=("1f1b",), zero_stages=(0,))
SLOW = 4.4e6
"""Bytes per second between devices at which reducing gradients costs more than a pipeline."""


def correction(term, factor, samples=1):
    return Correction(term=term, factor=factor, spread=0.2, samples=samples)


def make_basis(folder=None, *, link=1e8, **factors):
    machine, devices = profile(link=link), cluster(2)
    return Basis(
        spec=spec(6, measured=True),
        profile=machine,
        cluster=devices,
        global_batch_size=32,
        memory_limit=None,
        search=SEARCH,
        store=None if folder is None else correction_store(folder, devices, "32-true", machine),
        corrections=tuple(correction(term, factor) for term, factor in factors.items()),
    )


def run(truth, plan):
    """What the stages of a plan measure on a machine that is as a basis says."""
    as_it_is = replace(plan, predicted=truth.predict(plan))
    return [Measured(times=times, spread=StageTimes(), steps=10) for times in predicted_times(as_it_is)]


class Teacher:
    """A learner, what it said, and where it would write a plan."""

    def __init__(self, basis, folder, *, search_seconds=0.1):
        self.said, self.path = [], folder / "mist_plan_better.json"
        self.plan = basis.tune().plan
        self.learner = Learner(
            basis=basis,
            plan=self.plan,
            is_plain=False,
            search_seconds=search_seconds,
            path=self.path,
            say=self.said.append,
            cached_at=folder / "kept.json",
        )


def test_a_run_corrects_what_later_runs_are_predicted_by(tmp_path):
    basis = make_basis(tmp_path)
    truth = replace(basis, corrections=(correction("forward", 1.25), correction("update", 0.8)))
    errors = []
    for _ in range(4):
        basis = with_corrections(replace(basis, corrections=()), tmp_path, "32-true", lambda line: None)
        teacher = Teacher(basis, tmp_path)
        errors.append(basis.predict(teacher.plan).step_seconds / truth.predict(teacher.plan).step_seconds - 1)
        teacher.learner.learn(run(truth, teacher.plan))
        assert teacher.said[-1].startswith("later plans for this machine are corrected by it: forward x 1.")
    assert abs(errors[0]) > 0.05
    assert abs(errors[-1]) < 0.005
    assert [abs(error) for error in errors] == sorted(map(abs, errors), reverse=True)
    kept, warning = load_corrections(basis.store)
    assert warning is None
    assert factor_of(kept, "forward") == pytest.approx(1.25, abs=0.02)
    assert {item.samples for item in kept} == {4}


def test_a_run_teaches_once(tmp_path):
    basis = make_basis(tmp_path)
    teacher = Teacher(basis, tmp_path)
    measured = run(replace(basis, corrections=(correction("forward", 1.25),)), teacher.plan)
    teacher.learner.learn([None] * len(measured))
    assert not basis.store.path.exists()
    teacher.learner.learn(measured)
    first = teacher.learner.basis.corrections
    teacher.learner.learn(measured)
    assert teacher.learner.basis.corrections == first
    assert len(teacher.said) == 1


def test_without_a_store_nothing_is_learned(tmp_path):
    teacher = Teacher(make_basis(), tmp_path)
    teacher.learner.learn(run(make_basis(forward=1.25), teacher.plan))
    teacher.learner.look_again(is_training=False)
    assert teacher.learner.basis.corrections == ()
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_kept_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    teacher = Teacher(make_basis(tmp_path / "file"), tmp_path)
    teacher.learner.learn(run(make_basis(forward=1.25), teacher.plan))
    assert "is not kept for later ones" in teacher.said[0]
    assert factor_of(teacher.learner.basis.corrections, "forward") > 1.1


def test_a_better_plan_is_found_and_written(tmp_path):
    """Of the first choice the profile had said that reducing gradients takes half of what it does."""
    teacher = Teacher(make_basis(tmp_path, link=SLOW, communication=0.5), tmp_path)
    assert short_name(teacher.plan) == "1 stage x dp 2, G=4"
    (tmp_path / "kept.json").write_text("a plan")
    teacher.learner.learn(run(make_basis(link=SLOW), teacher.plan))
    teacher.learner.look_again(is_training=True)
    better = teacher.learner.better
    assert not (tmp_path / "kept.json").exists(), "the next run would use the plan that is not the best any more"
    assert better.name == "2 stages x dp 1, G=4"
    assert better.gain == 1 - better.step_seconds / better.current_seconds > LEAST_GAIN
    other = load(teacher.path)
    assert short_name(other) == better.name
    assert other.fingerprint == teacher.plan.fingerprint
    assert other.predicted.step_seconds == better.step_seconds == teacher.learner.basis.predict(other).step_seconds
    assert better.current_seconds == teacher.learner.basis.predict(teacher.plan).step_seconds
    said = str(better)
    assert f"{better.gain:.0%} less per step: 2 stages x dp 1, G=4, " in said
    assert f"strategy.plan={teacher.path}" in said


def test_what_is_not_executed_is_not_searched_and_that_is_said():
    basis = make_basis()
    wish = replace(basis, search=replace(basis.search, offload=("optimizer",)))
    (note,) = (
        line for line in wish.tune().explain() if line.startswith("not offloaded: optimizer; a CPU's own memory")
    )
    assert note not in replace(basis, search=replace(basis.search, offload=())).tune().explain()


def test_a_node_with_files_offloads_within_their_room():
    """What does not fit goes there, as long as there is room."""
    basis = replace(make_basis(), has_files=True, host_limit=10**12)
    least = min(item.peak_bytes for item in basis.tune().predicted.stages)
    tight = replace(basis, memory_limit=least // 2, search=SearchSpace(num_stages=(1,)))
    assert any(stage.offload.any for stage in tight.tune().plan.stages)
    with pytest.raises(InfeasibleError, match="host's memory"):
        replace(tight, host_limit=1).tune()
    with pytest.raises(InfeasibleError):
        replace(tight, has_files=False).tune()


def test_a_plan_whose_estimate_does_not_fit_is_made_again_with_less_where_something_binds(monkeypatch):
    basis = replace(make_basis(), search=SearchSpace(schedules=("1f1b",), offload=()))
    least = max(stage.peak_bytes for stage in basis.tune().predicted.stages)
    basis = replace(basis, cluster=cluster(2, kind="cuda", memory=int(least / 0.8) + 1))
    monkeypatch.setattr(fitting, "estimate_of", needing(2.0))
    said = []
    (less, sure), (same, risky) = basis.tuned(said.append), basis.tuned(None)
    assert same is basis
    assert less.memory_limit < basis.cluster.device.memory_bytes
    assert less.tune().plan == sure.plan
    assert any("searching with less memory" in line for line in said)
    peaks = [max(stage.peak_bytes for stage in found.predicted.stages) for found in (sure, risky)]
    assert peaks[0] < peaks[1]


def test_a_good_plan_stays(tmp_path):
    teacher = Teacher(make_basis(tmp_path), tmp_path)
    (tmp_path / "kept.json").write_text("a plan")
    teacher.learner.learn(run(make_basis(communication=1.2), teacher.plan))
    teacher.learner.look_again(is_training=False)
    assert teacher.learner.better is None
    assert (tmp_path / "kept.json").exists()
    assert not teacher.path.exists()


def test_while_training_goes_on_only_a_quick_search_is_repeated(tmp_path):
    basis = make_basis(tmp_path, link=SLOW, communication=0.5)
    teacher = Teacher(basis, tmp_path, search_seconds=QUICK_SECONDS + 1)
    teacher.learner.learn(run(make_basis(link=SLOW), teacher.plan))
    teacher.learner.look_again(is_training=True)
    assert teacher.learner.better is None
    teacher.learner.look_again(is_training=False)
    assert teacher.learner.better is not None


def test_a_search_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    teacher = Teacher(make_basis(tmp_path), tmp_path)
    teacher.learner.learn(run(make_basis(), teacher.plan))

    def fail(self):
        raise InfeasibleError("No plan fits.")

    monkeypatch.setattr(Basis, "tune", fail)
    teacher.learner.look_again(is_training=False)
    assert teacher.said[-1] == "no other plan was looked for: No plan fits."
    assert teacher.learner.better is None


def test_what_earlier_runs_taught_is_used_and_said(tmp_path):
    basis, said = make_basis(tmp_path), []
    empty = replace(basis, store=None)
    assert with_corrections(empty, tmp_path, "32-true", said.append) == basis
    assert said == []
    save_corrections(basis.store, [correction("backward", 1.5, samples=3)])
    found = with_corrections(empty, tmp_path, "32-true", said.append)
    assert found.corrections == (correction("backward", 1.5, samples=3),)
    assert said == ["predictions are corrected by what earlier runs measured: backward x 1.50 ± 0.20"]
    plan = basis.tune().plan
    assert found.predict(plan).step_seconds > basis.predict(plan).step_seconds
    assert found.tune().plan.predicted == found.predict(found.tune().plan)


def test_a_spoiled_file_is_ignored_and_replaced(tmp_path):
    basis, said = make_basis(tmp_path), []
    basis.store.path.write_text("{")
    found = with_corrections(basis, tmp_path, "32-true", said.append)
    assert found.corrections == ()
    assert "cannot be read" in said[0]
    teacher = Teacher(found, tmp_path)
    teacher.learner.learn(run(make_basis(forward=1.1), teacher.plan))
    assert json.loads(basis.store.path.read_text())["schema"] == 1


def test_too_few_steps_teach_nothing(tmp_path):
    basis = make_basis(tmp_path)
    teacher = Teacher(basis, tmp_path)
    measured = run(replace(basis, corrections=(correction("forward", 1.25),)), teacher.plan)
    teacher.learner.learn([replace(item, steps=LEAST_STEPS - 1) for item in measured])
    assert teacher.said == []
    teacher.learner.learn([replace(item, steps=LEAST_STEPS) for item in measured])
    assert len(teacher.said) == 1
