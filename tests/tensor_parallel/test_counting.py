import torch

from lightning_mist.tensor_parallel import CountingGroup


def test_a_group_says_what_it_was_asked_for_in_bytes_of_whole_tensors():
    group, said = CountingGroup(2), []
    group.all_reduce(torch.ones(3))
    group.watcher = lambda operation, size: said.append((operation, size))
    assert group.all_reduce(torch.ones(3), "max").shape == (3,)
    assert group.all_gather(torch.ones(3).half()).shape == (2, 3)
    assert group.reduce_scatter(torch.ones(2, 3)).shape == (3,)
    assert said == [("all_reduce", 12), ("all_gather", 12), ("reduce_scatter", 24)]
