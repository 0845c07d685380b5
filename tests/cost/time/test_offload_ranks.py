"""What the rank that has most moves, of what is dealt out whole over ranks."""

import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.time.offload_loads import parts_of_ranks, ratios_of
from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.sharding import assign_owners
from tests.specs import candidates_of, spec

NETWORK = spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500))


def stages(zero, ratio):
    """The whole network as one stage, once with every ZeRO stage."""
    ratios = OffloadRatios(parameters=ratio, gradients=ratio, optimizer=ratio, activations=ratio)
    return candidates_of(0, 4, 0, zero, offload=OffloadCandidates.of(ratios, len(zero)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_of_everything_the_rank_that_has_most_moves_its_own(ranks):
    sizes = [item.bytes for item in NETWORK.parameters]
    owned = np.zeros(ranks)
    np.add.at(owned, np.array(assign_owners(sizes, ranks)), sizes)
    most = owned.max() / sum(sizes)
    found = parts_of_ranks(MemoryModel(NETWORK), np.full(4, ranks), stages([0, 1, 2, 3], 1.0))
    # Shared out are optimizer state from ZeRO-1 on, gradients from ZeRO-2 on, parameters under ZeRO-3.
    parameters_K, gradients_K, owned_K, optimizer_K = found
    assert optimizer_K == pytest.approx([1, most, most, most])
    assert owned_K == pytest.approx([1, most, most, most])
    assert gradients_K == pytest.approx([1, 1, most, most])
    assert parameters_K == pytest.approx([1, 1, 1, most])


def test_where_nothing_is_moved_or_nobody_shares_it_is_all():
    for ranks, ratio in ((3, 0.0), (1, 0.5)):
        found = parts_of_ranks(MemoryModel(NETWORK), np.full(4, ranks), stages([0, 1, 2, 3], ratio))
        assert found.tolist() == [[1.0] * 4] * 4


def test_candidates_of_several_stages_are_answered_together():
    memory, every = MemoryModel(NETWORK), [(2, 0.5), (3, 1.0)]
    parts = [parts_of_ranks(memory, np.full(4, ranks), stages([0, 1, 2, 3], ratio)) for ranks, ratio in every]
    both = StageCandidates.joined([stages([0, 1, 2, 3], ratio) for _, ratio in every])
    found = parts_of_ranks(memory, np.repeat([2, 3], 4), both)
    assert found.tolist() == np.concatenate(parts, axis=1).tolist()


def test_without_ratios_nobody_can_tell():
    whole = stages([0], 1.0)
    assert ratios_of(whole) is whole.offload
    with pytest.raises(ValueError, match="nothing is offloaded"):
        ratios_of(candidates_of(0, 4))
