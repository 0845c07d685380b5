import numpy as np
import pytest

from lightning_mist.tuner import moved
from lightning_mist.tuner.bound import PRECISION, solve_each
from lightning_mist.tuner.narrowing import Narrowing
from lightning_mist.tuner.problem import places_behind
from lightning_mist.tuner.tally import family_of
from tests.tuner.searches import stages_of, tally_of

COUNTS, MICROBATCHES = (2, 3, 4), 4


def family(monkeypatch, few, below, **limits):
    """What stages may be, narrowed again if more than so many candidates are left; and what was done for it."""
    stages = stages_of(memory=600_000, offload=("optimizer", "activations"), offload_ratios=(0.0, 0.5, 1.0), **limits)
    stages.try_ratios(stages.space.offload_ratios)
    tally = tally_of(stages)
    tally.floors.kinds = frozenset(("optimizer", "activations"))
    asked, learn, narrowings, leave_out = [], moved.learn_seconds, [], Narrowing.leave_out

    def learned(model, ratios, items):
        asked.append(sum(len(places) for _, places in items))
        learn(model, ratios, items)

    def left(self, tables, others, every):
        before = sum(len(item.open_J) for item in every)
        leave_out(self, tables, others, every)
        narrowings.append((before, sum(len(item.open_J) for item in every)))

    with monkeypatch.context() as patch:
        patch.setattr(moved, "FEW", few)
        patch.setattr(moved, "learn_seconds", learned)
        patch.setattr(Narrowing, "leave_out", left)
        return family_of(tally, COUNTS, MICROBATCHES, below), sum(asked), narrowings


@pytest.mark.parametrize("more", [1.0001, 1.05, 1.5])
def test_pipelines_that_are_fast_enough_are_never_left_out(monkeypatch, more):
    every, _, none = family(monkeypatch, np.inf, 1e9)
    assert none == []
    wanted = {count: answer.objective for count, answer in solve_each(every, dict.fromkeys(COUNTS, np.inf)).items()}
    assert len(wanted) > 1
    for below in (value * more for value in wanted.values()):
        once, evaluated, _ = family(monkeypatch, np.inf, below)
        again, fewer, narrowings = family(monkeypatch, 0, below)
        assert narrowings
        assert all(after <= before for before, after in narrowings)
        assert fewer <= evaluated
        for found in (once, again):
            answers = solve_each(found, dict.fromkeys(found.heads, below))
            for count, value in wanted.items():
                if value < below:
                    assert answers[count].objective == pytest.approx(value, rel=2 * PRECISION)


def test_what_takes_too_long_with_what_it_has_to_move_is_not_evaluated(monkeypatch):
    every, _, _ = family(monkeypatch, np.inf, 1e9)
    best = min(answer.objective for answer in solve_each(every, dict.fromkeys(COUNTS, np.inf)).values())
    _, evaluated, _ = family(monkeypatch, np.inf, best * 0.999)
    _, fewer, narrowings = family(monkeypatch, 0, best * 0.999)
    assert fewer < evaluated
    assert any(after < before for before, after in narrowings)


def test_every_stage_is_asked_about_whichever_numbers_of_stages_are_ruled_out():
    tally = tally_of(stages_of(memory=600_000))
    space = tally.space
    found = tally.floors.narrowed(COUNTS, MICROBATCHES, 1e9)
    narrowing = Narrowing(sizes=(space.num_layers, space.world_size, MICROBATCHES), below=1e9, found=found)
    assert narrowing.places == [*places_behind(COUNTS), (0, 2), (0, 3), (0, 4)]
    keys = {place: (("middle", MICROBATCHES, -1, ()), index, 0) for index, place in enumerate(narrowing.places)}
    narrowing.keys.update(keys)
    left = narrowing.left(keys.values())
    assert all((left[key] == found.of(*place)).all() for place, key in keys.items())
    # One key may stand for several places.
    narrowing.keys = dict.fromkeys(keys, keys[0, 2])
    assert (narrowing.left([keys[0, 2]])[keys[0, 2]] == np.any([found.of(*place) for place in keys], axis=0)).all()
