"""What people do in steps, to batches and in layers trains as under DDP, or the plan is refused or stopped."""

import pytest

from tests.traps.run import cases, check

FIRST = {
    "batches": ("jagged layers", "nested", "lock"),
    "beforehand": ("adds", "detached"),
    "beside": ("judged", "evaluating without", "counting", "curriculum"),
    "branches": ("heads", "left out", "initialised", "counted", "aside/pp2"),
    "casts": ("half inside", "teacher first"),
    "compiled": ("blocks",),
    "context": ("attention", "clipped-and-accumulated", "attention-by-hand"),
    "cutting": ("labels_later", "annealed", "flagged_maximum", "added_later", "logs/tail", "behind/pp2tail"),
    "experts": ("as tuple", "by where", "grouped", "telling"),
    "habits": ("Adaptive", "SkipsSteps"),
    "tokens": ("causal/pp2tokens", "accuracy"),
}


@pytest.mark.parametrize(("family", "name", "plan"), cases(FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(outcome, family, name, plan):
    check(family, name, plan, outcome(family, name, plan))
