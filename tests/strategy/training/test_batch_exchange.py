import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from lightning_mist.errors import PlanError
from lightning_mist.plan import loader_of, row_slice
from lightning_mist.strategy.training.batch_exchange import BatchExchange, take_apart
from tests.memory_transport import InMemoryWorld, drive
from tests.plans import plan_of, plans

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
]

CPU = torch.device("cpu")


def make_plan(layout, *, rows, microbatches):
    return plan_of(rows * sum(map(len, layout)), microbatches, *({"devices": devices} for devices in layout))


def exchange(plan, batches):
    world = InMemoryWorld(plan.world_size)
    exchanges = [BatchExchange(plan, rank, world.transports[rank], CPU) for rank in range(plan.world_size)]
    drive([one.run(batch, state(rank)) for rank, (one, batch) in enumerate(zip(exchanges, batches, strict=True))])
    return exchanges


def state(rank):
    return torch.full((5,), rank, dtype=torch.uint8)


def batch(rank, rows, dtype=torch.int64):
    return {
        "x": (torch.arange(rows * 3).reshape(rows, 3) + 100 * rank).to(dtype),
        "flag": torch.tensor(rank),
        "name": f"r{rank}",
    }


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_whole_batches_reach_every_stage_with_their_random_state(dtype):
    exchanges = exchange(make_plan([[1], [0]], rows=4, microbatches=2), [batch(0, 4, dtype), batch(1, 4, dtype)])
    for one in exchanges:
        assert one.whole
        assert [item.owner for item in one.microbatches] == [0, 1]
        for owner, item in enumerate(one.microbatches):
            expected = batch(owner, 4, dtype)
            assert torch.equal(item.value["x"], expected["x"])
            assert item.value["x"].dtype == dtype
            assert (int(item.value["flag"]), item.value["name"]) == (owner, f"r{owner}")
            assert (item.weight, item.batch_rows) == (1.0, 4)
            assert torch.equal(item.random_state, state(owner))


def test_batches_of_different_sizes_are_cut_each_by_itself():
    exchanges = exchange(make_plan([[1], [0]], rows=4, microbatches=4), [batch(0, 4), batch(1, 3)])
    for one in exchanges:
        sizes = [len(item.value["x"]) for item in one.microbatches]
        assert sizes == [2, 2, 1, 2]
        assert [item.weight for item in one.microbatches] == [0.5, 0.5, 1 / 3, 2 / 3]
        joined = torch.cat([item.value["x"] for item in one.microbatches])
        assert torch.equal(joined, torch.cat([batch(0, 4)["x"], batch(1, 3)["x"]]))
        assert all(item.random_state is None for item in one.microbatches)
    seeds = [[item.seed for item in one.microbatches] for one in exchanges]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


def test_a_part_without_rows_is_not_computed():
    one, _ = exchange(make_plan([[1], [0]], rows=4, microbatches=4), [batch(0, 1), batch(1, 4)])
    empty, full = one.microbatches[:2]
    assert (empty.value, empty.weight) == (None, 0.0)
    assert (len(full.value["x"]), full.weight) == (1, 1.0)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_tensor_parallel_peers_get_the_same_rows_states_and_seeds(microbatches):
    plan = plan_of(8, microbatches, {"devices": (1, 0), "tensor": 2})
    first, second = exchange(plan, [batch(0, 4), batch(1, 4)])
    for mine, theirs in zip(first.microbatches, second.microbatches, strict=True):
        assert torch.equal(mine.value["x"], theirs.value["x"])
        assert (mine.owner, mine.weight) == (theirs.owner, theirs.weight)
        states = mine.random_state, theirs.random_state
        assert torch.equal(*states) if microbatches == 2 else states == (None, None)
        assert mine.seed == theirs.seed
    assert [item.owner for item in first.microbatches] == sorted([0, 1] * (microbatches // 2))
    assert first.whole == (microbatches == 2)


def test_plain_data_parallel_ranks_keep_their_own_batches():
    plan = make_plan([[0, 1]], rows=4, microbatches=2)
    for rank, one in enumerate(exchange(plan, [batch(0, 4), batch(1, 4)])):
        assert [item.owner for item in one.microbatches] == [rank, rank]
        assert torch.equal(torch.cat([item.value["x"] for item in one.microbatches]), batch(rank, 4)["x"])


def test_stages_of_different_degree_see_the_same_rows():
    plan = make_plan([[0, 1], [2]], rows=4, microbatches=3)
    exchanges = exchange(plan, [batch(rank, 4) for rank in range(3)])
    for microbatch in range(3):
        left, right, whole = (one.microbatches[microbatch] for one in exchanges)
        assert torch.equal(torch.cat([left.value["x"], right.value["x"]]), whole.value["x"])
        assert left.weight + right.weight == whole.weight == 1.0
        # Where one stage sees parts of a batch no stage may wait for a state to arrive.
        assert [item.random_state for item in (left, right, whole)] == [None] * 3
        assert None not in (left.seed, right.seed, whole.seed)


@given(plans(max_microbatches=12, tensor_degrees=(1, 2), fewer_loaders=True), st.integers(0, 2))
def test_ranks_compute_on_the_batches_of_those_that_feed_them(plan, missing):
    rows = max(1, plan.global_batch_size // plan.num_loaders - missing)
    exchanges = exchange(plan, [batch(loader_of(plan, rank), rows) for rank in range(plan.world_size)])
    for rank, one in enumerate(exchanges):
        for index, item in enumerate(one.microbatches):
            piece = row_slice(plan, rank, index)
            first, end = piece.rows(rows)
            assert (item.owner, item.weight) == (piece.owner, (end - first) / rows)
            if end > first:
                assert torch.equal(item.value["x"], batch(loader_of(plan, piece.owner), rows)["x"][first:end])
            state_is_sent = one.whole and item.random_state is not None
            assert not state_is_sent or torch.equal(item.random_state, state(piece.owner))


def test_only_what_a_feeder_has_loaded_travels():
    plan = plan_of(4, 1, {"tensor": 2}, data_parallel_size=1)
    for one in exchange(plan, [batch(0, 4), batch(1, 4)]):
        (item,) = one.microbatches
        assert (item.owner, item.value["name"]) == (0, "r0")
        assert torch.equal(item.random_state, state(0))


def test_a_batch_that_cannot_be_cut_is_refused():
    ragged = {"x": torch.zeros(4, 2), "y": torch.zeros(3, 2)}
    with pytest.raises(PlanError, match=r"batch of rank 0 cannot be cut .* num_microbatches = 2"):
        exchange(make_plan([[1], [0]], rows=4, microbatches=4), [ragged, batch(1, 4)])


def test_a_ragged_batch_passes_whole():
    ragged = {"x": torch.zeros(4, 2), "y": torch.ones(3, 2)}
    one, _ = exchange(make_plan([[1], [0]], rows=4, microbatches=2), [ragged, batch(1, 4)])
    assert torch.equal(one.microbatches[0].value["y"], ragged["y"])


@dataclass
class Named:
    tokens: torch.Tensor
    names: list


def test_containers_of_any_class_arrive_as_they_were():
    def make(rank):
        encoding = BatchEncoding({"ids": torch.full((2, 3), rank), "empty": torch.zeros(2, 0)})
        return [encoding, Named(tokens=torch.full((2,), 10.0 + rank), names=["a", rank])]

    _, last = exchange(make_plan([[0], [1]], rows=2, microbatches=2), [make(0), make(1)])
    encoding, named = last.microbatches[0].value
    assert (type(encoding), type(named)) == (BatchEncoding, Named)
    assert encoding["ids"].tolist() == [[0] * 3] * 2
    assert (encoding["empty"].shape, named.tokens.tolist(), named.names) == ((2, 0), [10.0, 10.0], ["a", 0])


def test_tensors_that_were_in_host_memory_stay_there():
    meta = torch.device("meta")
    world = InMemoryWorld(2)
    exchanges = [
        BatchExchange(make_plan([[0], [1]], rows=2, microbatches=2), rank, world.transports[rank], meta)
        for rank in range(2)
    ]
    batches = [{"lengths": torch.tensor([rank, 5]), "x": torch.zeros(2, 3, device=meta)} for rank in range(2)]
    drive([one.run(batch, state(rank)) for rank, (one, batch) in enumerate(zip(exchanges, batches, strict=True))])
    for one in exchanges:
        for owner, item in enumerate(one.microbatches):
            assert item.value["lengths"].tolist() == [owner, 5]
            assert (item.value["x"].device, item.value["x"].shape) == (meta, (2, 3))


class Counting:
    """A transport that counts the gatherings of objects and the other calls."""

    def __init__(self, inner):
        self.inner, self.objects, self.others = inner, 0, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def all_gather(self, tensor, group):
        self.others += 1
        return self.inner.all_gather(tensor, group)

    def all_gather_object(self, value, group):
        self.objects += 1
        return self.inner.all_gather_object(value, group)


def test_structures_are_told_only_when_somebodys_has_changed():
    plan = make_plan([[0], [1]], rows=4, microbatches=2)
    world = InMemoryWorld(2)
    transports = [Counting(transport) for transport in world.transports]
    exchanges = [BatchExchange(plan, rank, transports[rank], CPU) for rank in range(2)]
    told = []
    for sizes in ((4, 4), (4, 4), (4, 3), (4, 3), (4, 4)):
        batches = [batch(rank, rows) for rank, rows in enumerate(sizes)]
        drive([one.run(item, state(rank)) for rank, (one, item) in enumerate(zip(exchanges, batches, strict=True))])
        told.append(transports[0].objects)
        for one in exchanges:
            for owner, item in enumerate(one.microbatches):
                assert torch.equal(item.value["x"], batches[owner]["x"])
                assert item.value["name"] == f"r{owner}"
    assert told == [1, 1, 2, 2, 3]
    assert transports[0].others == 2 * 5


class Graph:
    """No container that anybody knows."""

    def __init__(self, x):
        self.held = {"x": x}


class Carries(torch.Tensor):
    pass


def carries():
    made = torch.arange(3.0).as_subclass(Carries)
    made.meta = {"scale": 2.0}
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: pack_sequence([torch.arange(3), torch.arange(2)]),
        lambda: torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        carries,
        lambda: Graph(torch.arange(3)),
    ],
    ids=["packed", "jagged", "nested", "sparse", "rows", "subclass", "graph"],
)
def test_batches_of_every_class_arrive_as_what_they_were(make):
    batches = [{"z": make(), "y": torch.full((2,), rank)} for rank in range(2)]
    every = exchange(make_plan([[0], [1]], rows=4, microbatches=2), batches)
    for own in every:
        for microbatch in own.microbatches:
            found, wanted = microbatch.value["z"], batches[microbatch.owner]["z"]
            assert type(found) is type(wanted)
            assert vars(found).get("meta") == vars(wanted).get("meta") if isinstance(wanted, Carries) else True
            assert shown(found) == shown(wanted)


def shown(value):
    """Its text; ragged dimensions have a number of their own each."""
    return re.sub(r"j\d+", "j", repr(vars(value) if isinstance(value, Graph) else value))


def test_tensors_inside_of_objects_travel_apart_from_them():
    graph, other = Graph(torch.ones(2)), Graph(torch.zeros(2))
    tensors, text = take_apart({"graph": graph, "again": graph.held["x"]}, CPU)
    assert len(tensors) == 1
    assert tensors[0] is graph.held["x"]
    assert text == take_apart({"graph": other, "again": other.held["x"]}, CPU)[1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(4, 3, device="meta"), "on device meta"),
        (torch.ones(4, 3, requires_grad=True), "a tensor that requires a gradient"),
        ((item for item in ()), "TypeError: cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_go_to_other_ranks_is_refused_before_anything_is_sent(value, said):
    plan, alone = make_plan([[0], [1]], rows=4, microbatches=2), make_plan([[0, 1]], rows=4, microbatches=1)
    with pytest.raises(PlanError, match=f"the batch of rank 0 cannot .*{said}.*: give batches of"):
        exchange(plan, [{"x": torch.ones(4, 3), "z": value}, batch(1, 4)])
    (mine, _) = exchange(alone, [{"x": torch.ones(4, 3), "z": value}, batch(1, 4)])
    assert mine.microbatches[0].value["z"] is value


@pytest.mark.parametrize(
    ("layout", "microbatches"), [([[0], [1]], 2), ([[0], [1]], 4), ([[0, 1]], 2)], ids=["whole", "parts", "alone"]
)
def test_a_batch_without_rows_is_shared_out_to_nobody(layout, microbatches):
    with pytest.raises(PlanError, match=r"the batch of rank 1 has 0 rows, .* leave empty batches out of the loader"):
        exchange(make_plan(layout, rows=4, microbatches=microbatches), [batch(0, 4), batch(1, 0)])


def test_a_rank_alone_with_whole_batches_takes_one_without_rows():
    _, other = exchange(make_plan([[0, 1]], rows=4, microbatches=1), [batch(0, 4), batch(1, 0)])
    assert other.microbatches[0].batch_rows == 0


def test_batches_whose_tensors_have_lost_a_dimension_are_not_cut():
    world = InMemoryWorld(2)
    plan = make_plan([[0, 1]], rows=4, microbatches=2)
    one = BatchExchange(plan, 0, world.transports[0], CPU)
    rows, labels = torch.ones(4, 4), torch.ones(4)
    for good in ((rows, labels), (labels, rows), (rows[:3], labels[:3]), (rows[:, None], labels), (labels,)):
        drive([one.run(list(good), state(0))])
    with pytest.raises(PlanError, match=r"batch 6 of rank 0 has tensors of \[1, 1\] dimensions, 3 in all before"):
        drive([one.run([rows[0], labels], state(0))])


@pytest.mark.parametrize(
    "made", [torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor([x], layout=torch.jagged)]
)
def test_tensors_of_any_layout_that_require_a_gradient_are_not_sent(made):
    with pytest.raises(ValueError, match="requires a gradient"):
        take_apart([made(torch.ones(2, 3)).requires_grad_()], CPU)
