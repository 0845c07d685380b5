from typing import Any

import pytest
import torch

from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.device_bench import DeviceBench, measure_on_device, network_groups
from lightning_mist.hardware.measure.timing import Session
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS

HANDLE: Any = object()


def group(*ranks: int, nodes: int = 1) -> RankGroup:
    return RankGroup(ranks=ranks, num_nodes=nodes, handle=HANDLE)


def test_a_cpu_has_no_such_channels() -> None:
    def never() -> None:
        raise AssertionError("nothing is measured")

    session = Session(device=torch.device("cpu"), world=None)
    found = measure_on_device(session, (), copies=(0.0, 0.0), collectives=(), budget_seconds=1.0, report=never)
    assert found is None


def test_the_largest_group_of_either_kind_that_a_rank_is_in() -> None:
    groups = (group(0, 1), group(2, 3), group(0, 2, nodes=2), group(1, 3, nodes=2), group(0, 1, 2, 3, nodes=2))
    for rank, pair in ((0, 0), (1, 0), (2, 1), (3, 1)):
        assert network_groups(groups, rank) == (groups[pair], groups[4])
    assert network_groups((group(0, 1, nodes=2),), 1) == (None, group(0, 1, nodes=2))
    assert network_groups((), 0) == (None, None)


@pytest.mark.gpu
def test_device() -> None:
    session = Session(device=torch.device("cuda", 0), world=None)
    bench = DeviceBench(session, None, None)
    bench.seconds((1, 0, 0, 0), False)  # a first product makes the library's handle
    alone = bench.seconds((20, 0, 0, 0), False)
    assert alone > 0
    assert bench.seconds((40, 0, 0, 0), False) > alone
    with pytest.raises(ValueError, match="no group inside the node"):
        bench.seconds((0, 1, 0, 0), False)
    found = measure_on_device(session, (), copies=(2e10, 2e10), collectives=(), budget_seconds=2.0, report=lambda: None)
    assert found is not None
    assert all(0 <= getattr(found, name) <= 1 for name in COEFFICIENTS)
    # The copies are direct and the processor of a device does not make them: computation has little to do with them.
    assert found.compute_to_device < 0.7
    assert found.compute_to_host < 0.7
