import pickle

from lightning_mist.model.spec.allocation_events import Allocation, LayerEvents, PartEvents, StepPoint
from lightning_mist.model.spec.polynomial import Polynomial


def part(count: int) -> PartEvents:
    made = Allocation(
        size=Polynomial.constant(8 * count),
        born=StepPoint(direction="forward", position=1),
        dies=StepPoint(part=1, direction="backward", position=3),
        slot=0,
        role="activation",
        operator="aten.mm.default",
        dtype="float32",
    )
    return PartEvents(forward=(made,) * count, backward=(), forward_positions=2, backward_positions=-1)


def test_the_four_ways_are_told_apart_and_survive_pickling() -> None:
    events = LayerEvents(first=part(1), later=part(2), recomputed_first=part(3), recomputed_later=part(4))
    ways = [events.way(recomputed=r, first=f) for r in (False, True) for f in (True, False)]
    assert [len(way.forward) for way in ways] == [1, 2, 3, 4]
    assert pickle.loads(pickle.dumps(events)) == events
    assert hash(events) == hash(pickle.loads(pickle.dumps(events)))
