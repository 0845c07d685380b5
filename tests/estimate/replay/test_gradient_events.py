from lightning_mist.estimate.replay.gradient_events import BUCKETS_IN_FLIGHT, Gradients
from lightning_mist.estimate.replay.rank_state import ReplayedRank, padded
from lightning_mist.model.events import EventTape, Label
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.gradients import reducer
from lightning_mist.schedule import Action, ActionKind
from tests.cost.events import with_events
from tests.integration.parity import make_plan
from tests.specs import spec

LABEL = Label("gradient_bytes", "gradient")


def make(plan, rank=0, *, in_buckets=False, even=False, **network):
    found = with_events(spec(4, **network), tied=network.get("tied", False))
    found, tape = found.evenly() if even else found, EventTape()
    return tape, Gradients(tape, ReplayedRank(found, found, plan, rank), in_buckets=in_buckets)


def alive(tape):
    """Bytes of what is alive, ascending."""
    sizes = tape.bytes()
    events = tape.events().tolist()
    freed = {-event - 1 for event in events if event < 0}
    return sorted(int(sizes[event - 1]) for event in events if event > 0 and event - 1 not in freed)


def test_a_bucket_takes_its_gradients():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2))
    names = gradients.names[0]
    assert gradients.begins(0)
    gradients.expect(names)
    (bucket,) = gradients._view.buckets
    for name in bucket.names:
        assert len(alive(tape)) == list(bucket.names).index(name)
        size = gradients._view.by_name[name].bytes
        gradients.accumulate(name, tape.malloc(size, LABEL), 0, gradients._view.regions_of[name][0][0], way=True)
    # The last one filled the bucket: one number per parameter travels with it.
    assert alive(tape) == [bucket.bytes + 4 * len(bucket.names)]
    gradients.reduce()
    assert alive(tape) == [bucket.bytes + 4 * len(bucket.names)]
    gradients.forget()
    assert alive(tape) == []


def test_a_gradient_that_is_there_is_added_to():
    tape, gradients = make(make_plan([4], parts=2))
    gradients.found["blocks.0.bias"] = tape.malloc(400, LABEL)
    assert not gradients.begins(0)
    # Where this backward makes gradients, what is added to another is freed here; else its own events do that.
    gradients.accumulate("blocks.0.bias", tape.malloc(400, LABEL), 0, 1, way=True)
    assert alive(tape) == [400]


def test_two_uses_of_a_parameter_are_summed_first():
    tape, gradients = make(make_plan([4], parts=2), tied=True)
    assert gradients.is_watched("wte.weight", 0)
    gradients.accumulate("wte.weight", tape.malloc(80_000, LABEL), 0, 5, way=True)
    assert alive(tape) == [80_000]
    assert "wte.weight" not in gradients.found
    gradients.accumulate("wte.weight", tape.malloc(80_000, LABEL), 0, 0, way=True)
    assert alive(tape) == [80_000]
    assert "wte.weight" in gradients.found


def test_units_keep_what_they_own():
    plan = make_plan([4], degrees=[2], parts=2, zero=2)
    tape, gradients = make(plan)
    view = gradients._view
    line = Action(0, ActionKind.REDUCE_GRADIENTS, None, 1)
    mine = sum(flat.with_counts for flat in view.unit_gradients[0, 1] if flat.owner == view.mesh.peer_index)
    every = sum(flat.with_counts for flat in view.unit_gradients[0, 1])
    for _ in range(2):
        for flat in view.unit_gradients[0, 1]:
            for name in flat.names:
                gradients.found[name] = tape.malloc(view.by_name[name].bytes, LABEL)
        before = sum(alive(tape))
        gradients.line(line)
        assert sum(alive(tape)) <= before + every
    gradients.reduce()
    assert sum(alive(tape)) == mine
    gradients.forget()
    assert alive(tape) == []


def test_units_are_unsharded_for_as_long_as_somebody_uses_them():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2, zero=3))
    view, largest = gradients._view, 0
    for unit in range(4):
        mine = view.mesh.peer_index
        others = sum(flat.bytes for flat, keys in view.shards if (0, unit) in keys and flat.owner != mine)
        gradients.line(Action(0, ActionKind.UNSHARD, None, unit))
        assert sum(alive(tape)) == others
        gradients.line(Action(0, ActionKind.RESHARD, None, unit))
        assert alive(tape) == []
        largest = max(largest, others)
    assert largest >= 40_000


def test_distributed_data_parallel_keeps_gradients_in_its_buckets():
    tape, gradients = make(make_plan([4], degrees=[2]), in_buckets=True)
    assert not gradients.begins(0)
    gradients.expect(gradients.names[0])
    assert not gradients.is_watched("blocks.0.weight", 0)
    gradients.complete(gradients.names[0])
    gradients.reduce()
    assert alive(tape) == []


def fill(tape, gradients, flat):
    for name in flat.names:
        gradients.found[name] = tape.malloc(gradients._view.by_name[name].bytes, LABEL)


def test_a_rank_keeps_its_piece_of_a_unit_and_adds_to_it():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2, zero=2), 1, even=True)
    line, (flat,) = Action(0, ActionKind.REDUCE_GRADIENTS, None, 1), gradients._view.unit_gradients[0, 1]
    assert (flat.bytes, flat.with_counts) == (2 * flat.piece, flat.bytes)
    for before in ([], [flat.piece]):
        fill(tape, gradients, flat)
        gradients.line(line)
        assert alive(tape) == [*before, flat.piece, flat.bytes]
        gradients._settle()
        assert alive(tape) == [flat.piece]
    gradients.reduce()
    for name in flat.names:
        gradients.drop(name)
    assert alive(tape) == []


def test_pieces_of_zero_1_arrive_beside_their_buffers():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2, zero=1), even=True)
    (flat,) = gradients._view.buckets
    fill(tape, gradients, flat)
    gradients.expect(gradients.names[0])
    gradients.complete(gradients.names[0])
    assert alive(tape) == [flat.piece, flat.bytes]
    gradients.reduce()
    assert alive(tape) == [flat.piece]
    gradients.gather()
    assert max(size for size in tape.bytes()) == flat.bytes
    assert alive(tape) == [flat.piece]


def test_all_of_a_unit_is_fetched_where_ranks_have_pieces():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2, zero=3), 1, even=True, frozen=("blocks.1.weight",))
    flats = gradients._view.shards_of[0, 1]
    assert [flat.names for flat in flats] == [("blocks.1.weight",), ("blocks.1.bias",)]
    gradients.line(Action(0, ActionKind.UNSHARD, None, 1))
    assert alive(tape) == sorted(flat.bytes for flat in flats)
    gradients.line(Action(0, ActionKind.RESHARD, None, 1))
    assert alive(tape) == []


def test_of_what_moves_a_piece_passes_through_buffers():
    for zero in (1, 2):
        plan = make_plan([4], degrees=[2], parts=2, zero=zero, offload=OffloadRatios(gradients=0.999))
        tape, gradients = make(plan, 1, even=True)
        moved, stays = sorted(gradients._view.unit_gradients[0, 1], key=lambda flat: not flat.leaves)
        assert (moved.names, stays.names) == (("blocks.1.weight",), ("blocks.1.bias",))
        # From ZeRO-2 on sums are of pieces.
        assert gradients.room == padded(moved.piece if zero == 2 else moved.bytes)
        for flat in (moved, stays):
            fill(tape, gradients, flat)
        for kind in (ActionKind.REDUCE_GRADIENTS, ActionKind.STORE_GRADIENTS):
            gradients.line(Action(0, kind, None, 1))
        assert alive(tape) == [stays.piece if zero == 2 else gradients._view.by_name[stays.names[0]].bytes]


def test_of_what_is_in_host_memory_all_is_gathered():
    plan = make_plan([4], degrees=[2], parts=2, zero=3, offload=OffloadRatios(parameters=0.999))
    tape, gradients = make(plan, 1, even=True)
    flats = {flat.leaves: flat for flat in gradients._view.shards_of[0, 1]}
    gradients.line(Action(0, ActionKind.UNSHARD, None, 1))
    assert alive(tape) == sorted(flat.bytes for flat in flats.values())
    gradients.line(Action(0, ActionKind.RESHARD, None, 1))
    gradients.line(Action(0, ActionKind.LOAD_PARAMETERS, None, 1))
    assert alive(tape) == [flats[True].bytes]
    gradients.line(Action(0, ActionKind.STORE_PARAMETERS, None, 1))
    gradients.rest()
    assert alive(tape) == []


def test_ranks_update_what_lies_in_their_pieces():
    plan = make_plan([4], degrees=[3], parts=1, zero=2)
    views = [make(plan, rank, even=True)[1]._view for rank in range(3)]
    for name, item in views[0].by_name.items():
        assert sum(view.parts.get(name, 0) for view in views) == item.bytes
    assert max(sum(view.parts.values()) for view in views) <= sum(flat.piece for flat in views[0].buckets)


def test_tied_parameters_of_two_groups_are_summed_in_flat_buffers():
    tape, gradients = make(make_plan([2, 2]), tied=True)
    gradients.found["wte.weight"] = tape.malloc(80_000, LABEL)
    gradients.reduce_tied()
    assert alive(tape) == [80_004]


def test_updated_parameters_are_given_out_in_turn():
    tape, gradients = make(make_plan([4], degrees=[2], parts=2, zero=1), edge_bytes=40 * 2**20)
    gradients.gather()
    sizes = [bucket.bytes for bucket in gradients._view.buckets]
    assert len(sizes) > BUCKETS_IN_FLIGHT
    assert alive(tape) == []
    events = tape.events().tolist()
    assert max(sum(1 if event > 0 else -1 for event in events[:end]) for end in range(len(events) + 1)) == 2


def test_as_many_buckets_are_under_way_as_in_the_runtime():
    assert reducer._BUCKETS_IN_FLIGHT == BUCKETS_IN_FLIGHT
