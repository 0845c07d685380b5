import argparse

from benchmarks.planner.memory_rate import SLOTS, candidates_of, measure
from lightning_mist.cost import StageSlot
from tests.specs import spec


def test_candidates_are_all_choices_of_a_place() -> None:
    slot = StageSlot(rows=1, batch_rows=4, **SLOTS["first of 4, 8 ranks"])  # type: ignore[arg-type]
    # Ends 1 and 2 of 3 layers: 2 + 3 ways to recompute, 4 stages of ZeRO.
    found = candidates_of(3, slot, 21)
    columns = (found.start_K, found.end_K, found.checkpointed_K, found.zero_stage_K)
    choices = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(set(choices[:20])) == 20
    assert choices[20] == choices[0] == (0, 1, 0, 0)
    assert max(choices) == (0, 2, 2, 3)


def test_every_place_is_measured_with_and_without_offload() -> None:
    samples = measure(spec(4), "toy", argparse.Namespace(candidates=50, repeats=1))
    assert [(item["slot"], item["offload"]) for item in samples] == [
        (place, offload) for place in SLOTS for offload in (False, True)
    ]
    for item in samples:
        assert item["candidates"] == 50
        assert isinstance(item["candidates_per_second"], float)
        assert item["candidates_per_second"] > 0
