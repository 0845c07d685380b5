import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError, ScheduleError, TraceError
from lightning_mist.plan.mesh import Overlap, Side
from lightning_mist.runtime.communication.transport import Crossing, DistributedTransport, GraphEnd, complete, span

GROUPS = [(0, 1, 2), (0, 2), (1, 2)]


def _transport():
    return DistributedTransport(GROUPS, torch.device("cpu"))


def _messages():
    """Every rank first sends to all others, then receives in another order of tags."""
    transport = _transport()
    others = [rank for rank in range(3) if rank != transport.rank]
    sends = [
        transport.isend(torch.full((1000,), 10.0 * transport.rank + tag), peer, tag)
        for peer in others
        for tag in (0, 1)
    ]
    got = {}

    def run():
        for tag in (1, 0):
            for peer in others:
                buffer = torch.empty(1000)
                yield transport.irecv(buffer, peer, tag)
                got[peer, tag] = buffer.unique().tolist()
        yield from sends
        return "end"

    assert complete(run()) == "end"
    transport.close()
    return got


def test_messages_arrive_by_tag(gloo_workers):
    for rank, got in enumerate(gloo_workers.run(3, _messages)):
        peers = [peer for peer in range(3) if peer != rank]
        assert got == {(peer, tag): [10.0 * peer + tag] for peer in peers for tag in (0, 1)}


def _collectives():
    transport = _transport()
    value = float(transport.rank + 1)
    result = {}
    for group in GROUPS:
        if transport.rank not in group:
            continue
        tensors = [torch.full((3,), value) for _ in range(3)]
        works = [
            transport.all_reduce(tensors[0], group),
            transport.reduce(tensors[1], group[-1], group),
            transport.broadcast(tensors[2], group[0], group),
        ]
        objects = transport.all_gather_object({"rank": transport.rank, "pad": "x" * transport.rank}, group)
        for work in works:
            work.wait()
        largest = torch.full((3,), value)
        transport.all_reduce(largest, group, "max").wait()
        gathered = transport.all_gather(torch.full((2, 2), value), group).result()
        entries = torch.arange(len(group) * 2.0).reshape(len(group), 2)
        scattered = transport.reduce_scatter(entries * value, group).result()
        result[group] = (
            (tensors[0][0].item(), tensors[1][0].item(), tensors[2][0].item(), objects),
            (largest[0].item(), gathered, scattered),
        )
    alone = torch.ones(2)
    for work in (
        transport.all_reduce(alone, (transport.rank,)),
        transport.reduce(alone, transport.rank, (transport.rank,)),
        transport.broadcast(alone, transport.rank, (transport.rank,)),
    ):
        work.wait()
    assert alone.tolist() == [1.0, 1.0]
    assert transport.all_gather(alone, (transport.rank,)).result().tolist() == [[1.0, 1.0]]
    assert transport.reduce_scatter(alone[None], (transport.rank,)).result().tolist() == [1.0, 1.0]
    assert transport.all_gather_object("me", (transport.rank,)) == ["me"]
    return result


def test_collectives_on_overlapping_groups(gloo_workers):
    for rank, result in enumerate(gloo_workers.run(3, _collectives)):
        assert list(result) == [group for group in GROUPS if rank in group]
        for group, ((total, reduced, sent, objects), (largest, gathered, scattered)) in result.items():
            assert largest == group[-1] + 1
            assert torch.equal(gathered, torch.stack([torch.full((2, 2), member + 1.0) for member in group]))
            place = group.index(rank)
            assert scattered.tolist() == [2.0 * place * total, (2.0 * place + 1) * total]
            assert total == sum(member + 1 for member in group)
            assert sent == group[0] + 1
            assert objects == [{"rank": member, "pad": "x" * member} for member in group]
            if rank == group[-1]:
                assert reduced == total


def _refusals():
    transport = _transport()
    strided = torch.zeros(4, 4)[:, ::2]
    with pytest.raises(ScheduleError, match="only contiguous tensors travel"):
        transport.all_reduce(strided, (0, 1, 2))
    with pytest.raises(ScheduleError, match=r"shape \(2, 3\) over 3 ranks: its first dimension must have one entry"):
        transport.reduce_scatter(torch.zeros(2, 3), (0, 1, 2))
    with pytest.raises(PlanError, match=r"no process group of ranks \[0, 1\].*\[0, 2\]"):
        transport.all_reduce(torch.zeros(1), (0, 1))


def test_what_would_go_wrong_silently_is_refused(gloo_workers):
    gloo_workers.run(3, _refusals)


def crossing(mine=1, theirs=1, *, index=0, batch_dim=0, rows=3, shared=(False, False), sequence_dim=None, length=1):
    return Crossing(
        batch_dim=batch_dim,
        rows=rows,
        mine=Side(degree=mine, is_shared=shared[0]),
        theirs=Side(degree=theirs, is_shared=shared[1]),
        index=index,
        sequence_dim=sequence_dim,
        length=length,
    )


def test_parts_join_to_the_whole():
    tensor = torch.arange(60.0).reshape(2, 6, 5)
    overlaps = [Overlap(ranks=(0,), first=0, end=1), Overlap(ranks=(1,), first=1, end=3)]
    found = crossing(batch_dim=1)
    portions = found.leaving(overlaps)
    assert [(portion.rank, portion.overlap) for portion in portions] == [(0, overlaps[0]), (1, overlaps[1])]
    assert found.arriving(overlaps) == tuple((portion,) for portion in portions)
    parts = [found.cut(tensor, portion) for portion in portions]
    assert [tuple(part.shape) for part in parts] == [found.shape(tensor.shape, portion) for portion in portions]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(found.join([[part] for part in parts]), tensor)


def test_a_whole_tensor_needs_no_rows_and_no_copy():
    tensor = torch.zeros(5, 2)
    whole = Overlap(ranks=(0,), first=0, end=3)
    assert span(5, 3, whole) == (0, 5)
    (portion,) = crossing().leaving([whole])
    assert crossing().cut(tensor, portion).data_ptr() == tensor.data_ptr()


def test_without_batch_dimension_parts_are_whole_and_summed():
    tensor, found = torch.ones(3), crossing(batch_dim=None, rows=2)
    (portion,) = found.leaving([Overlap(ranks=(0,), first=1, end=2)])
    assert found.shape(tensor.shape, portion) == (3,)
    assert torch.equal(found.cut(tensor, portion), tensor)
    assert torch.equal(found.join([[tensor], [2 * tensor]]), 3 * tensor)


def test_ranks_with_equal_copies_share_the_serving():
    overlap = Overlap(ranks=(10, 11, 12), first=0, end=3)
    assert [[p.rank for p in crossing(2, 3, index=k).leaving([overlap])] for k in (0, 1)] == [[10, 12], [11]]
    two = Overlap(ranks=(20, 21), first=0, end=3)
    assert [crossing(3, 2, index=k).arriving([two])[0][0].rank for k in range(3)] == [20, 21, 20]


@given(
    degrees=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shared=st.tuples(st.booleans(), st.booleans()),
    length=st.integers(1, 12),
    rows=st.integers(2, 5),
    data=st.data(),
)
def test_every_rank_ends_with_what_it_holds_whatever_the_other_side_holds(degrees, shared, length, rows, data):
    """All ranks of two sides over memory: what is cut on one side is what the other side joins."""
    tensor = torch.arange(rows * length * 2.0).reshape(rows, length, 2)
    cut = data.draw(st.integers(1, rows - 1))
    # The receiving stage has one data-parallel rank, the sending stage two.
    slices = ((0, cut), (cut, rows))
    box = {}
    for number, (low, high) in enumerate(slices):
        for index in range(degrees[0]):
            mine = crossing(*degrees, index=index, rows=high - low, shared=shared, sequence_dim=1, length=length)
            begin, end = mine.mine.held(index, length)
            overlap = Overlap(ranks=tuple(range(degrees[1])), first=0, end=high - low)
            for portion in mine.leaving([overlap]):
                held = tensor[low:high, begin:end]
                box[number * degrees[0] + index, portion.rank] = mine.cut(held, portion)
    for index in range(degrees[1]):
        mine = crossing(*degrees[::-1], index=index, rows=rows, shared=shared[::-1], sequence_dim=1, length=length)
        overlaps = [
            Overlap(ranks=tuple(range(number * degrees[0], (number + 1) * degrees[0])), first=low, end=high)
            for number, (low, high) in enumerate(slices)
        ]
        begin, end = mine.mine.held(index, length)
        expected = tensor[:, begin:end]
        arriving = mine.arriving(overlaps)
        buffers = [[box.pop((portion.rank, index)) for portion in row] for row in arriving]
        for row, portions in zip(buffers, arriving, strict=True):
            assert [tuple(part.shape) for part in row] == [mine.shape(expected.shape, portion) for portion in portions]
        assert torch.equal(mine.join(buffers), expected)
    assert box == {}


def test_entries_that_do_not_belong_to_rows_are_refused():
    with pytest.raises(TraceError, match="5 entries along its batch dimension for 3 rows"):
        span(5, 3, Overlap(ranks=(0,), first=0, end=1))


def test_graph_end_gives_gradients_and_lets_the_tensors_go():
    x = torch.randn(4, requires_grad=True)
    a, b = x * 2, x.exp().sum()
    gone = weakref.ref(a)
    end = GraphEnd([a, b])
    gc.disable()
    try:
        del a
        assert gone() is None
    finally:
        gc.enable()
    end.backward([torch.ones(4), None])
    assert torch.equal(x.grad, torch.full((4,), 2.0))


def test_graph_end_of_a_leaf_accumulates_in_it():
    x = torch.randn(4, requires_grad=True)
    GraphEnd([x]).backward([torch.ones(4)])
    assert torch.equal(x.grad, torch.ones(4))


def test_an_abandoned_graph_end_frees_its_graph():
    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    kept = []

    def pack(tensor):
        saved = Saved(tensor)
        kept.append(weakref.ref(saved))
        return saved

    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        y = (x * 2).exp()
    end = GraphEnd([y])
    del y
    gc.disable()
    try:
        assert any(ref() is not None for ref in kept)
        del end
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()
