import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.tensor_parallel.rules_elementwise import mix, own_stream


def test_seeds_are_those_of_splitmix64():
    # the first numbers of SplitMix64 from seed 1234567 (its reference implementation), without their highest bit
    known = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert tuple(mix(1234567, rank) for rank in range(3)) == tuple(value & (1 << 63) - 1 for value in known)


def test_ranks_differ_and_the_common_stream_goes_on_alike():
    numbers, after = [], []
    for rank in range(3):
        torch.manual_seed(4)
        for _ in range(2):
            with own_stream(torch.empty(1), rank):
                numbers.append(torch.rand(5))
        after.append(torch.rand(5))
    assert len({tuple(value.tolist()) for value in numbers}) == 6
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


def test_the_common_stream_survives_an_error():
    torch.manual_seed(4)
    try:
        with own_stream(torch.empty(1), 0):
            torch.rand(100)
            raise ValueError
    except ValueError:
        found = torch.rand(2)
    torch.manual_seed(4)
    with own_stream(torch.empty(1), 1):
        pass
    assert torch.equal(found, torch.rand(2))


def test_fakes_draw_nothing():
    state = torch.get_rng_state()
    with FakeTensorMode():
        fake = torch.empty(1)
    with own_stream(fake, 0):
        pass
    assert torch.equal(torch.get_rng_state(), state)
