from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import Exclusion, ModuleMap
from lightning_mist.strategy.planning import workflow as planning
from lightning_mist.strategy.planning.workflow import _searched, _with_safe_cuts
from lightning_mist.tuner import SearchSpace
from tests.plans import plan_of


def pipeline(degrees, microbatches):
    """Stages of one layer with these data-parallel degrees, for batches of 8 rows per rank."""
    return plan_of(8 * sum(degrees), microbatches, *({"data": degree} for degree in degrees))


@pytest.mark.parametrize(
    ("degrees", "microbatches", "is_cut"),
    [((1, 1), 2, False), ((1, 1), 4, True), ((2,), 1, False), ((1, 2), 3, True), ((2, 1), 3, True)],
)
@pytest.mark.parametrize("rows", [8, 4, None])
def test_given_plans_may_cut_batches_only_where_that_changes_nothing(monkeypatch, degrees, microbatches, is_cut, rows):
    """Also where only some stages cut them, and on ranks whose own batch has other sizes than the plan's."""
    asked = []
    monkeypatch.setattr(planning, "on_rank_zero", lambda work: work())
    empty = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    excluding = ModuleMap(
        step="training_step",
        blocks=(),
        cuts=(),
        parameters=(),
        exclusions=(Exclusion(feature="microbatches", reason="its loss is a sum"),),
    )
    batch = torch.zeros(()) if rows is None else torch.zeros(rows)
    proves = SimpleNamespace(batch=batch, with_invariance=lambda found, plan: (asked.append(found), found)[1])
    _with_safe_cuts(proves, empty, pipeline(degrees, microbatches))
    assert bool(asked) == is_cut
    planner = SimpleNamespace(batch=batch, with_invariance=lambda found, plan: excluding)
    if not is_cut:
        _with_safe_cuts(planner, empty, pipeline(degrees, microbatches))
        return
    with pytest.raises(PlanError, match=r"into up to \d parts, but its loss is a sum. Use a plan"):
        _with_safe_cuts(planner, empty, pipeline(degrees, microbatches))


class Searching:
    """A planner that finds cut plans until they are ruled out."""

    def __init__(self, *exclusions, enough=None):
        self.request = SimpleNamespace(search=SearchSpace(), directory=None, offload_directory=None)
        self.strategy = SimpleNamespace(root_device=None)
        self.trainer = SimpleNamespace(precision="32-true")
        self.alike = SimpleNamespace(devices_per_node=4)
        self.exclusions, self.enough, self.done = exclusions, enough, []
        self.progress = SimpleNamespace(tell=self.done.append, say=self.done.append)
        self.update_seconds = lambda: 0.0
        self.seconds = lambda found: ()
        self.count = lambda *_: self.done.append("count")
        self.simplest = lambda made: made.plan
        self.plainest = lambda: pipeline((2,), 1)
        self.may_be_plain = True
        self.fingerprint = lambda found: ()

    def rule_out_cuts(self, reason, feature="microbatches"):
        self.done.append(reason)

    def worthwhile(self, found, profile, seconds, update, degrees):
        return self.enough, degrees[:1]

    def split(self, found, degrees):
        self.done.append(f"split {degrees}")
        return found

    def with_invariance(self, found, plan):
        self.done.append("prove")
        return replace(found, exclusions=self.exclusions)

    def tune(self):
        parts = 2 if "its loss is a sum" in self.done else 4
        self.done.append("tune")
        return SimpleNamespace(plan=pipeline((1, 1), parts))


def searched(monkeypatch, planner):
    monkeypatch.setattr(planning, "on_rank_zero", lambda work: work())
    monkeypatch.setattr(planning, "everywhere", lambda work: work())
    monkeypatch.setattr(planning.local_machine, "machine_profile", lambda *_: None)
    found = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    return _searched(planner, found)[0]


def test_cuts_are_proved_when_a_plan_has_them_and_searched_around_if_refuted(monkeypatch):
    refuted = Searching(Exclusion(feature="microbatches", reason="its loss is a sum"))
    assert searched(monkeypatch, refuted).num_microbatches == 2
    assert refuted.done[-5:] == ["count", "tune", "prove", "its loss is a sum", "tune"]
    proved = Searching()
    assert searched(monkeypatch, proved).num_microbatches == 4
    assert proved.done[-3:] == ["count", "tune", "prove"]


def test_chunks_that_are_refuted_after_another_search_are_searched_around(monkeypatch):
    """In rows together tokens may come apart that do not one row at a time."""
    whole = {"data": 1, "tail": 2}
    plans = [plan_of(8, 4, whole), plan_of(8, 1, {**whole, "tail": 3}), plan_of(8, 1, {**whole, "tail": 1})]
    reasons = [("microbatches", "its loss is a sum"), ("tail_tokens", "it pools")]
    planner = Searching()
    planner.tune = lambda: planner.done.append("tune") or SimpleNamespace(plan=plans.pop(0))
    planner.with_invariance = lambda found, plan: found.excluding(*reversed(reasons.pop(0)))
    assert searched(monkeypatch, planner).stages[-1].tail_chunks == 1
    assert planner.done[-5:] == ["tune", "its loss is a sum", "tune", "it pools", "tune"]


def test_layers_are_split_only_where_that_could_save_something(monkeypatch):
    some = Searching()
    searched(monkeypatch, some)
    assert "what 4 devices that share layers exchange takes longer than it could save" in some.done
    assert "split ((2,), ())" in some.done
    nothing = Searching(enough="no other plan could save anything")
    assert searched(monkeypatch, nothing).is_plain
    # What was not tried must not be proposed later either.
    assert nothing.done[-2:] == ["count", "it was not tried whether parts of a batch train as the whole does"]
    assert not [line for line in nothing.done if line.startswith(("split", "prove", "tune"))]


def test_a_plan_is_kept_by_what_was_known_before_anything_was_tried(monkeypatch):
    class Excluding(Searching):
        call, kept_by = SimpleNamespace(talk=""), ()

        def split(self, found, degrees):
            return replace(found, exclusions=(Exclusion(feature="tensor", reason="nothing to split"),))

        def plain_is_enough(self, reduction):
            return None

        def cached(self, found):
            self.kept_by += (found,)

        def cache(self, found, plan):
            self.kept_by += (found,)

    planner = Excluding()
    planner.request.plan = "auto"
    monkeypatch.setattr(planning, "on_rank_zero", lambda work: work())
    monkeypatch.setattr(planning, "everywhere", lambda work: work())
    monkeypatch.setattr(planning.local_machine, "machine_profile", lambda *_: None)
    monkeypatch.setattr(planning.local_machine, "guessed_reduction", lambda *_: 0.0)
    empty = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    found = planning._plan(planner, empty)[2]
    assert found.excludes("tensor")
    assert planner.kept_by == (empty, empty)
