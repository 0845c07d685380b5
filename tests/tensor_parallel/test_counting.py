import torch

from lightning_mist.tensor_parallel import CountingGroup


def test_shapes_and_bytes_of_the_whole_tensor():
    group, x = CountingGroup(4, 2), torch.zeros(4, 3)
    assert (group.size, group.rank) == (4, 2)
    assert group.all_reduce(x, "max").shape == (4, 3)
    assert group.all_gather(x.half()).shape == (4, 4, 3)
    assert group.reduce_scatter(x).shape == (3,)
    assert group.calls == [("all_reduce", 48), ("all_gather", 96), ("reduce_scatter", 48)]
