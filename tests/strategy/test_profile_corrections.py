import json
from dataclasses import replace

import pytest

from lightning_mist.cost import predict
from lightning_mist.errors import InfeasibleError
from lightning_mist.explain import fitting
from lightning_mist.hardware import (
    Correction,
    StepOverheads,
    corrected,
    correction_store,
    factor_of,
    load_corrections,
    save_corrections,
)
from lightning_mist.strategy.profile_corrections import (
    LEAST_STEPS,
    Learner,
    PlanBasis,
    observe,
    with_corrections,
)
from lightning_mist.strategy.run_report import Measured, predicted_times
from lightning_mist.tuner import SearchSpace
from tests.cost.memory.test_memory_model import make_plan
from tests.explain.test_fitting import needing
from tests.specs import cluster, profile, spec

SEARCH = SearchSpace(num_stages=(1, 2), num_microbatches=(4,), schedules=("1f1b",), zero_stages=(0,))


def correction(term, factor, runs=2):
    return Correction(term=term, factor=factor, ratios=(factor,) * runs)


def make_basis(folder=None, *, link=1e8, **factors):
    machine, devices = profile(link=link), cluster(2)
    return PlanBasis(
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
    return [Measured(times=times, steps=10) for times in predicted_times(as_it_is)]


class Teacher:
    """A learner, what it said, and where it keeps its plan."""

    def __init__(self, basis, folder):
        self.said, self.kept = [], folder / "kept.json"
        self.plan = basis.tuned(None)[1].plan
        self.learner = Learner(basis=basis, plan=self.plan, say=self.said.append, cached_at=self.kept)


def test_a_run_corrects_what_later_runs_are_predicted_by(tmp_path):
    basis = make_basis(tmp_path)
    truth = replace(basis, corrections=(correction("forward", 1.25), correction("update", 0.8)))
    errors = []
    for _ in range(4):
        basis = with_corrections(replace(basis, corrections=()), tmp_path, "32-true", lambda line: None)
        teacher = Teacher(basis, tmp_path)
        errors.append(basis.predict(teacher.plan).step_seconds / truth.predict(teacher.plan).step_seconds - 1)
        teacher.learner.learn(run(truth, teacher.plan))
        assert teacher.said[-1].startswith("later plans for this machine are corrected by it")
        assert ": forward x 1." in teacher.said[-1]
    assert abs(errors[0]) > 0.05
    assert abs(errors[1]) < 0.6 * abs(errors[0])
    assert abs(errors[-1]) < 1e-6
    kept, warning = load_corrections(basis.store)
    assert warning is None
    assert factor_of(kept, "forward") == pytest.approx(1.25, abs=0.02)
    assert {len(item.ratios) for item in kept} == {4}


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
    assert teacher.learner.basis.corrections == ()
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_kept_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    teacher = Teacher(make_basis(tmp_path / "file"), tmp_path)
    teacher.learner.learn(run(make_basis(forward=1.25), teacher.plan))
    assert "is not kept for later ones" in teacher.said[0]
    assert factor_of(teacher.learner.basis.corrections, "forward") > 1.1


@pytest.mark.parametrize("lesson", [1.02, 1.6])
def test_later_fits_plan_anew_where_what_was_learned_matters(tmp_path, lesson):
    teacher = Teacher(make_basis(tmp_path), tmp_path)
    teacher.kept.write_text("a plan")
    teacher.learner.learn(run(make_basis(forward=lesson), teacher.plan))
    assert teacher.kept.exists() == (lesson == 1.02)
    assert ("the next fit plans anew" in teacher.said[-1]) == (lesson != 1.02)


def test_what_is_not_executed_is_not_searched_and_that_is_said():
    basis = make_basis()
    wish = replace(basis, search=replace(basis.search, offload=("optimizer",)))
    (note,) = (
        line
        for line in wish.tuned(None)[1].explain()
        if line.startswith("not offloaded: optimizer; a CPU's own memory")
    )
    assert note not in replace(basis, search=replace(basis.search, offload=())).tuned(None)[1].explain()


def test_a_node_with_files_offloads_within_their_room():
    """What does not fit goes there, as long as there is room."""
    basis = replace(make_basis(), has_files=True, host_limit=10**12)
    least = min(item.peak_bytes for item in basis.tuned(None)[1].predicted.stages)
    tight = replace(basis, memory_limit=least // 2, search=SearchSpace(num_stages=(1,)))
    assert any(stage.offload.any for stage in tight.tuned(None)[1].plan.stages)
    with pytest.raises(InfeasibleError, match="host's memory"):
        replace(tight, host_limit=1).tuned(None)[1]
    with pytest.raises(InfeasibleError):
        replace(tight, has_files=False).tuned(None)[1]


def test_a_plan_whose_estimate_does_not_fit_is_made_again_with_less_where_something_binds(monkeypatch):
    basis = replace(make_basis(), search=SearchSpace(schedules=("1f1b",), offload=()))
    least = max(stage.peak_bytes for stage in basis.tuned(None)[1].predicted.stages)
    basis = replace(basis, cluster=cluster(2, kind="cuda", memory=int(least / 0.8) + 1))
    monkeypatch.setattr(fitting, "estimate_of", needing(2.0))
    said = []
    (less, sure), (same, risky) = basis.tuned(said.append), basis.tuned(None)
    assert same is basis
    assert less.memory_limit < basis.cluster.device.memory_bytes
    assert less.tuned(None)[1].plan == sure.plan
    assert any("searching with less memory" in line for line in said)
    peaks = [max(stage.peak_bytes for stage in found.predicted.stages) for found in (sure, risky)]
    assert peaks[0] < peaks[1]


def test_what_earlier_runs_taught_is_used_and_said(tmp_path):
    basis, said = make_basis(tmp_path), []
    empty = replace(basis, store=None)
    assert with_corrections(empty, tmp_path, "32-true", said.append) == basis
    assert said == []
    save_corrections(basis.store, [correction("backward", 1.5, runs=3)])
    found = with_corrections(empty, tmp_path, "32-true", said.append)
    assert found.corrections == (correction("backward", 1.5, runs=3),)
    assert said == ["predictions are corrected by what earlier runs measured: backward x 1.50"]
    plan = basis.tuned(None)[1].plan
    assert found.predict(plan).step_seconds > basis.predict(plan).step_seconds
    assert found.tuned(None)[1].plan.predicted == found.predict(found.tuned(None)[1].plan)


def test_a_spoiled_file_is_ignored_and_replaced(tmp_path):
    basis, said = make_basis(tmp_path), []
    basis.store.path.write_text("{")
    found = with_corrections(basis, tmp_path, "32-true", said.append)
    assert found.corrections == ()
    assert "cannot be read" in said[0]
    teacher = Teacher(found, tmp_path)
    teacher.learner.learn(run(make_basis(forward=1.1), teacher.plan))
    assert json.loads(basis.store.path.read_text())["schema"] == 2


def test_too_few_steps_teach_nothing(tmp_path):
    basis = make_basis(tmp_path)
    teacher = Teacher(basis, tmp_path)
    measured = run(replace(basis, corrections=(correction("forward", 1.25),)), teacher.plan)
    teacher.learner.learn([replace(item, steps=LEAST_STEPS - 1) for item in measured])
    assert teacher.said == []
    teacher.learner.learn([replace(item, steps=LEAST_STEPS) for item in measured])
    assert len(teacher.said) == 1


OVERHEADS = StepOverheads(step_seconds=2.0, action_seconds=0.5, message_seconds=0.25)
NONE = StepOverheads()


def planned(corrections=(), **kwargs):
    machine = corrected(replace(profile(), overheads=kwargs.pop("overheads", NONE)), corrections)
    plan = make_plan(kwargs.pop("layers", [2, 4]), **kwargs)
    return replace(plan, predicted=predict(spec(6, measured=True), machine, cluster(plan.world_size), plan))


def exactly(plan, **kwargs):
    """What stages measure if everything is as predicted."""
    return [Measured(times=replace(item, **kwargs), steps=4) for item in predicted_times(plan)]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (2, 1), (1, 4)])
def test_what_is_expected_is_what_was_predicted(zero, degree, microbatches):
    plan = planned(degree=degree, microbatches=microbatches, rows=2, zero=zero, checkpointed=1)
    found = observe(plan, exactly(plan), corrections=(), is_plain=False, knows_layers=True)
    total = 0.0
    for item in found:
        assert sum(seconds for _, seconds in item.expected) == pytest.approx(item.seconds)
        total += item.seconds
    times = predicted_times(plan)
    assert total == pytest.approx(sum(stage.total - stage.waiting_seconds for stage in times))
    terms = [dict(item.expected) for item in found]
    is_lumped = degree > 1 and microbatches == 1 and zero < 2
    assert any(item.get("backward") and item.get("communication") for item in terms) == (
        is_lumped or (zero == 3 and degree > 1)
    )


def test_corrections_that_a_prediction_contains_are_taken_out_of_what_is_expected():
    known = (
        correction("forward", 1.5),
        correction("update", 0.75),
    )
    plain, plan = planned(microbatches=4, checkpointed=1), planned(known, microbatches=4, checkpointed=1)
    before = observe(plain, exactly(plain), corrections=(), is_plain=False, knows_layers=True)
    after = observe(plan, exactly(plan), corrections=known, is_plain=False, knows_layers=True)
    for one, other in zip(before, after, strict=True):
        assert dict(one.expected) == pytest.approx(dict(other.expected))
        assert one.seconds != pytest.approx(other.seconds) or "backward" not in dict(one.expected)


def test_overheads_are_expected_of_every_action_and_of_the_step():
    plan = planned(microbatches=4, overheads=OVERHEADS)
    found = observe(plan, exactly(plan, other_seconds=3.0), corrections=(), is_plain=False, knows_layers=True)
    overheads = [dict(item.expected).get("overhead", 0.0) for item in found]
    # Two stages of 4 forwards, or 4 backwards, at each of which a message is posted to or from the one boundary.
    assert overheads == [2.0, 2 * 4 * (0.5 + 0.25), 0.0, 2 * 4 * (0.5 + 0.25)]
    for item in found[1:]:
        assert sum(seconds for _, seconds in item.expected) == pytest.approx(item.seconds)
    assert found[0].seconds == 3.0
    plain = observe(plan, exactly(plan, other_seconds=3.0), corrections=(), is_plain=True, knows_layers=True)
    assert not any(dict(item.expected).get("overhead") for item in plain)


def test_nothing_is_learned_of_computation_that_was_not_measured():
    plan = planned(degree=2, microbatches=4)
    (found,) = observe(plan, exactly(plan), corrections=(), is_plain=True, knows_layers=False)
    assert {term for term, seconds in found.expected if seconds} == {"update"}


def test_plans_without_prediction_or_measurement_teach_nothing():
    plan = planned()
    assert observe(replace(plan, predicted=None), exactly(plan), corrections=(), is_plain=True, knows_layers=True) == ()
    assert observe(plan, [None, exactly(plan)[1]], corrections=(), is_plain=True, knows_layers=True) == ()
