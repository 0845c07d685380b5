import torch

from lightning_mist.tensor_parallel import CountingGroup


def test_shapes_and_bytes_of_the_whole_tensor():
    group, x = CountingGroup(4, 2), torch.zeros(4, 3)
    assert (group.size, group.rank) == (4, 2)
    assert group.all_reduce(x, "max").shape == (4, 3)
    assert group.all_gather(x.half()).shape == (4, 4, 3)
    assert group.reduce_scatter(x).shape == (3,)
    assert group.calls == [("all_reduce", 48), ("all_gather", 96), ("reduce_scatter", 48)]


def test_a_group_says_what_it_was_asked_for_in_bytes_of_whole_tensors():
    group, said = CountingGroup(2), []
    group.all_reduce(torch.ones(3))
    group.watcher = lambda operation, size: said.append((operation, size))
    assert group.all_reduce(torch.ones(3)).shape == (3,)
    assert group.all_gather(torch.ones(3)).shape == (2, 3)
    assert group.reduce_scatter(torch.ones(2, 3)).shape == (3,)
    assert said == [("all_reduce", 12), ("all_gather", 24), ("reduce_scatter", 24)]
