import gc
import weakref

import pytest
import torch

from lightning_mist.errors import TraceError
from lightning_mist.runtime.boundary import GraphEnd, join, part_of, part_shape, span
from lightning_mist.runtime.mesh import Overlap


def test_parts_join_to_the_whole():
    tensor = torch.arange(60.0).reshape(2, 6, 5)
    overlaps = [Overlap(rank=0, first=0, end=1), Overlap(rank=1, first=1, end=3)]
    parts = [part_of(tensor, 1, 3, overlap) for overlap in overlaps]
    assert [tuple(part.shape) for part in parts] == [part_shape(tensor.shape, 1, 3, overlap) for overlap in overlaps]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(join(parts, 1), tensor)


def test_a_whole_tensor_needs_no_rows_and_no_copy():
    tensor = torch.zeros(5, 2)
    whole = Overlap(rank=0, first=0, end=3)
    assert span(5, 3, whole) == (0, 5)
    assert part_of(tensor, 0, 3, whole).data_ptr() == tensor.data_ptr()


def test_without_batch_dimension_parts_are_whole_and_summed():
    tensor = torch.ones(3)
    overlap = Overlap(rank=0, first=1, end=2)
    assert part_shape(tensor.shape, None, 2, overlap) == (3,)
    assert torch.equal(part_of(tensor, None, 2, overlap), tensor)
    assert torch.equal(join([tensor, 2 * tensor], None), 3 * tensor)


def test_entries_that_do_not_belong_to_rows_are_refused():
    with pytest.raises(TraceError, match="5 entries along its batch dimension for 3 rows"):
        span(5, 3, Overlap(rank=0, first=0, end=1))


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
