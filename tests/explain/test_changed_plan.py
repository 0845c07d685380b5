from dataclasses import replace

from lightning_mist.explain.changed_plan import (
    Ground,
    even_lengths,
    every_stage,
    microbatch_counts,
    with_lengths,
    with_microbatches,
)
from lightning_mist.tuner import SearchSpace
from tests.tuner.plans import pipeline

GROUND = Ground(cuts_batches=True, search=SearchSpace())
PLAIN = pipeline({"layers": 3}, {"layers": 3}, microbatches=2, rows=1)


def test_a_batch_that_is_not_cut_leaves_one_number_of_microbatches():
    whole = replace(GROUND, cuts_batches=False)
    assert microbatch_counts(PLAIN, [1, 1], whole) == (2,)
    cut = pipeline({"layers": 6, "data": 2}, microbatches=4, rows=4)
    assert microbatch_counts(cut, [2], GROUND) == (1, 2, 4)
    assert microbatch_counts(cut, [2], whole) == (1,)


def test_only_asked_numbers_of_microbatches_are_looked_at():
    asked = replace(GROUND, search=SearchSpace(num_microbatches=(2, 3)))
    assert microbatch_counts(pipeline({"layers": 6, "data": 2}, rows=4), [2], asked) == (2,)


def test_chunks_need_rounds_of_microbatches():
    plan = pipeline(*({"layers": 1} for _ in range(6)), groups=3, schedule="interleaved-1f1b", microbatches=3, rows=4)
    assert microbatch_counts(plan, [1, 1, 1], GROUND) == (3, 6, 12)


def test_other_microbatches_leave_the_batch_as_it_is():
    plan = pipeline({"layers": 3, "data": 2}, {"layers": 3}, microbatches=6, rows=4)
    changed = with_microbatches(plan, 3)
    assert changed.global_batch_size == plan.global_batch_size
    assert [stage.microbatch_size for stage in changed.stages] == [2, 4]


def test_layers_are_dealt_out_evenly_and_no_more_are_recomputed_than_there_are():
    plan = pipeline({"layers": 1}, {"layers": 6, "checkpointed": 6})
    assert even_lengths(plan) == (3, 4)
    even = with_lengths(plan, (3, 4))
    assert even.bounds == ((0, 3), (3, 7))
    assert [stage.checkpointing.layers for stage in even.stages] == [0, 4]


def test_all_stages_change():
    other = replace(PLAIN.stages[1].checkpointing, layers=2)
    wider = every_stage(PLAIN, lambda stage: replace(stage, checkpointing=other))
    assert [stage.checkpointing.layers for stage in wider.stages] == [2, 2]
