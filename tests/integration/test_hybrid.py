"""ZeRO within groups of ranks: what groups must tell each other, in modules that are not alike everywhere."""

from functools import cache

import pytest
import torch

from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.gradients.reducer import GradientReducer, UnitGradients
from tests import zoo
from tests.integration.parity import assert_equal, cast, make_plan, map_of, reference, run_plan

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

MOVED = OffloadRatios(gradients=1.0, optimizer=1.0)


@cache
def prepared(name):
    torch.manual_seed(11)
    module, make_batch = zoo.make(name)
    module = module.double()
    batches = [cast(make_batch(8), torch.float64) for _ in range(16)]
    return module, map_of(module, batches[0]), batches


def hybrid(layers, zero, **options):
    return make_plan(layers, zero=zero, parts=2, rows=8, **{"degrees": [4], "shard": 2, **options})


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, MOVED])
def test_a_gradient_that_only_one_group_has_is_everyones(zero, offload):
    """Ranks 0 and 1 are a group, 2 and 3 the other: parameters that one, both or none of them uses."""
    module, _, batches = prepared("sometimes")
    uses = [[batch for batch in batches if bool(batch["extra"][0]) is wanted] for wanted in (True, False)]
    module_map, plan = map_of(module, uses[0][0]), hybrid([4], zero, offload=offload)
    for pattern in ((0, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 1)):
        chosen = [uses[kind][place % len(uses[kind])] for place, kind in enumerate(pattern)]
        assert_equal(run_plan(module, module_map, plan, chosen, seen=lend), reference(module, chosen))


def lend(ranks):
    """Bring gradients back from host memory."""
    for rank in ranks:
        if (moved := rank.executor.gradients) is not None:
            moved.install(torch.ones(()))
            moved.lend(moved.names)


@pytest.mark.parametrize("zero", [(2, 1), (3, 0), (1, 2)])
def test_a_tied_weight_is_the_same_in_every_group_of_every_stage(zero):
    module, module_map, batches = prepared("gpt2")
    plan = hybrid([2, 2], zero, degrees=[4, 4], shard=[2, 2 if zero[1] else None])
    assert_equal(run_plan(module, module_map, plan, batches[:8]), reference(module, batches[:8]))


@pytest.mark.combinations
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["batch_norm", "shared_block", "no_blocks", "stray"])
def test_modules_with_buffers_or_without_layers(name, zero):
    module, module_map, batches = prepared(name)
    plan = make_plan([len(module_map.blocks)], degrees=[4], zero=zero, shard=2, rows=8)
    assert_equal(run_plan(module, module_map, plan, batches[:4]), reference(module, batches[:4]))


@pytest.mark.parametrize(("zero", "of"), [(1, GradientReducer), (2, UnitGradients)])
def test_groups_that_tell_each_other_nothing_are_noticed(monkeypatch, zero, of):
    init = of.__init__

    def alone(self, mesh, *args, **options):
        init(self, mesh, *args, **options)
        self._replicates = (mesh.rank,)

    monkeypatch.setattr(of, "__init__", alone)
    module, module_map, batches = prepared("nano")
    outcome = run_plan(module, module_map, hybrid([4], zero), batches[:4])
    with pytest.raises(AssertionError, match="off by"):
        assert_equal(outcome, reference(module, batches[:4]))
