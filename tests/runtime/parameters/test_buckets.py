import weakref
from types import SimpleNamespace

import torch
from torch import nn

from lightning_mist.runtime.parameters.buckets import Bucket, make_buckets, padded_numel, views_like


def _parameters(*sizes, dtype=torch.float32):
    return [(f"p{i}", nn.Parameter(torch.zeros(size, dtype=dtype)), None) for i, size in enumerate(sizes)]


def test_buckets_close_at_their_capacity_and_keep_the_order():
    buckets = make_buckets(_parameters(10, 10, 300, 5, 5), capacity=400, first_capacity=40)
    assert [bucket.names for bucket in buckets] == [("p0",), ("p1", "p2"), ("p3", "p4")]
    assert [bucket.numel for bucket in buckets] == [10, 310, 10]


def test_owners_and_dtypes_do_not_mix():
    a, b, c = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())
    buckets = make_buckets([("a", a, 0), ("b", b, 1), ("c", c, 0), ("d", nn.Parameter(torch.zeros(3)), 0)])
    assert [(bucket.names, bucket.owner) for bucket in buckets] == [(("a", "d"), 0), (("b",), 1), (("c",), 0)]
    assert buckets[0].buffer(torch.float32, extra=2).numel() == 7
    assert buckets[2].buffer(torch.float64).dtype is torch.float64


def test_views_begin_at_multiples_of_the_alignment():
    tensors = [torch.zeros(3), torch.zeros(4), torch.zeros(2, 3)]
    assert padded_numel(tensors, 4) == 4 + 4 + 8
    views = views_like(torch.arange(16.0), tensors, alignment=4)
    assert [view.flatten()[0].item() for view in views] == [0.0, 4.0, 8.0]
    assert [view.shape for view in views] == [tensor.shape for tensor in tensors]


def test_views_share_memory_and_have_the_strides_of_dense_tensors():
    plain, last = torch.zeros(2, 3), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    expanded = torch.zeros(()).expand(2, 2)
    flat = torch.arange(6.0 + 96 + 4)
    views = views_like(flat, [plain, last, expanded])
    assert [view.stride() for view in views] == [plain.stride(), last.stride(), (2, 1)]
    for view in views:
        view.zero_()
    assert not flat.any()


def test_gradients_are_gone_when_their_buffer_leaves():
    """What a collective takes memory for does not lie beside them."""
    parameters = [(name, parameter) for name, parameter, _ in _parameters(10, 20)]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    references = [weakref.ref(parameter.grad) for _, parameter in parameters]

    def all_reduce(flat, group):
        assert not any(reference() is not None for reference in references)
        return SimpleNamespace(wait=lambda: None)

    plan = SimpleNamespace(num_loaders=2)
    mesh = SimpleNamespace(shard_peers=(0, 1), shard_index=0, plan=plan)
    _, result = Bucket(parameters).begin(mesh, SimpleNamespace(all_reduce=all_reduce))
    assert result().tolist() == [0.5] * 30 + [1.0] * 2
