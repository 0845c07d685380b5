import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.parity import random as parity_random
from benchmarks.parity.cell import Outcome, subject
from benchmarks.parity.plans import make_plan
from lightning_mist.plan import ParameterSplit, SequenceSplit, TensorSplit, row_slice
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

SPLIT = TensorSplit(
    degree=2,
    parameters=(ParameterSplit(name="w", dim=0, factors=((2, True),)),),
    sequence=(SequenceSplit(position=0, leaf=0, dim=1),),
)


def test_every_draw_is_a_plan_that_can_be_cut_and_all_features_occur():
    contexts = (replace(SPLIT, parameters=()),)
    module_map = replace(subject("plain", torch.float64).module_map, splits=(SPLIT,), contexts=contexts)
    seen = dict.fromkeys(parity_random.FEATURES, 0)
    for seed in range(150):
        layout, rows = parity_random.draw(random.Random(seed), module_map)
        plan = make_plan(layout, len(module_map.blocks), rows=rows)
        assert plan.world_size <= parity_random.MOST_RANKS
        for rank in range(plan.world_size):
            pieces = [row_slice(plan, rank, index).rows(rows) for index in range(plan.num_microbatches)]
            assert all(low < high for low, high in pieces)
        for feature, has in parity_random.FEATURES.items():
            seen[feature] += has(layout)
    assert min(seen.values()) >= 5


@pytest.mark.thorough
@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_random_plans_are_equal(seed):
    """More of them: ``python -m benchmarks.parity.random --seeds 200``."""
    name, layout, outcome = parity_random.run(seed, ("nano_even", "plain", "sometimes"))
    assert outcome.differing == "", (name, layout)


def test_the_record_has_a_line_per_model(monkeypatch, capsys):
    records = []
    monkeypatch.setattr(parity_random, "write_record", records.append)
    outcomes = iter([Outcome(gradient=1e-15), Outcome(refused="no"), Outcome(gradient=3e-16)])

    def attempt(compare, *_):
        return next(outcomes) if compare is parity_random.compare_gradients else Outcome()

    monkeypatch.setattr(parity_random, "attempt", attempt)
    assert parity_random.main(["--seeds", "3", "--models", "plain"]) == 0
    (row,) = records[0].samples
    assert (row["model"], row["plans"], row["refused"], row["differing"]) == ("plain", 2, 1, 0)
    assert row["largest difference"] == "1.0e-15"
    assert "3 plans, 0 differ" in capsys.readouterr().out


def test_a_plan_that_differs_is_printed_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(parity_random, "attempt", lambda *_: Outcome(differing="gradient of w"))
    assert parity_random.main(["--seeds", "1", "--first", "5", "--models", "plain", "--no-record"]) == 1
    out = capsys.readouterr().out
    assert "seed 5, " in out
    assert "gradient of w" in out
    assert "Layout(groups=" in out
