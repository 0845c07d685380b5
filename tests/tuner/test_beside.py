import numpy as np
import pytest

from lightning_mist.tuner import beside, search
from lightning_mist.tuner.bound import PRECISION
from lightning_mist.tuner.past import Precedent
from tests.tuner.searches import stages_of, tally_of


@pytest.mark.parametrize("memory", [600_000, 700_000])
def test_a_pipeline_like_one_found_before_is_as_good_if_it_still_fits(memory):
    stages = stages_of(memory=memory)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    several = [item for item in outcome.found.values() if len(item.answer.chosen) > 1]
    assert several
    for found in several:
        tally = tally_of(stages_of(memory=memory))
        # Nothing is known of its number of stages, and nothing that would have to be beaten.
        precedent = Precedent.of(found.alone, found.problem.num_microbatches)
        most = found.answer.objective * 1.01
        beside._look_like(tally, precedent, most)
        (like,) = tally.best.values()
        assert len(like.answer.chosen) == len(found.answer.chosen)
        assert like.answer.objective <= found.answer.objective * (1 + PRECISION)
        again = dict(tally.best)
        beside._look_like(tally, precedent, most)
        assert tally.best == again
        tight = tally_of(stages_of(memory=100))
        beside._look_like(tight, precedent, most)
        assert not tight.best


@pytest.mark.parametrize("close", [1.0, 2.0])
def test_other_numbers_of_stages_are_searched_until_enough_that_are_close_are_known(monkeypatch, close):
    counts, compare = [], beside._compare

    def noted(tally, groups, most, num_stages):
        known = {count for count in tally.best if tally.least_of(count) <= tally.least * close}
        counts.append((num_stages, len(known)))
        compare(tally, groups, most, num_stages)

    monkeypatch.setattr(beside, "CLOSE", close)
    monkeypatch.setattr(beside, "_compare", noted)
    monkeypatch.setattr(beside, "ENOUGH", 1)
    stages = stages_of(memory=600_000)
    outcome = search.search_pipelines(stages, stages.space, np.inf)
    wanted = beside.compared(stages.space, outcome.winner)
    looked = [count for count, _ in counts]
    assert outcome.winner > 2
    assert looked == list(wanted if close == 1.0 else wanted[: len(looked)])
    # The winner is as close as can be.
    assert all(known <= beside.ENOUGH for count, known in counts if count > 1)
    assert (len(looked) < len(wanted)) == (close > 1)


def test_precedents_that_are_no_pipelines_of_the_space_are_left_out():
    stages = stages_of(memory=700_000)
    alone = search.search_pipelines(stages, stages.space, np.inf)
    counts = beside.compared(stages.space, alone.winner)
    none = Precedent(num_microbatches=7, layers=(1, 1), devices=(1, 3), slowest=1.0)
    precedents = dict.fromkeys(counts, none)
    found = search.search_pipelines(stages_of(memory=700_000), stages.space, np.inf, (), precedents)
    assert set(counts) > {1}
    assert found.best.keys() == alone.best.keys()
    assert found.bound == alone.bound
