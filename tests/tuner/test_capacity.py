import numpy as np
import pytest

from lightning_mist.errors import InfeasibleError
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.infeasible import held_bytes, kept_bytes, too_large
from tests.specs import cluster, profile, spec
from tests.tuner.searches import stages_of


def test_what_a_network_keeps_is_its_parameters_and_what_its_optimizer_keeps_of_them():
    stages = stages_of()
    held = [stages.model.whole.holdings.table]
    parameters, trained = held[0].bytes_P.sum(), held[0].trainable_P.sum()
    state = stages.model.spec.optimizer.state_bytes_per_parameter_byte
    assert kept_bytes(stages.model) == parameters + state * trained > parameters


def test_hosts_count_only_where_something_may_be_there():
    planner = Planner(spec(), cluster(2), profile=profile())
    for offload, host in (((), 0), (("optimizer",), 3_000)):
        space = planner.space(8, SearchSpace(offload=offload))
        stages = planner.stages(space, 10_000, 2 * 3_000)
        assert held_bytes(stages) == 2 * (stages.memory_limit + host)


@pytest.mark.parametrize("offload", [(), ("parameters", "optimizer")])
def test_what_nothing_can_hold_is_not_searched_for(offload, monkeypatch):
    planner = Planner(spec(), cluster(2), profile=profile())
    kept = kept_bytes(planner.model)
    search = SearchSpace(offload=offload)
    limits = {"memory_limit": int(kept / 8), "host_memory_limit": int(kept / 8)}
    assert too_large(planner.stages(planner.space(8, search), *limits.values()))
    monkeypatch.setattr("lightning_mist.tuner.planner.search_pipelines", None)
    with pytest.raises(InfeasibleError, match=r"Parameters and optimizer state alone are .* together may hold"):
        planner.tune(global_batch_size=8, search=search, **limits)


def test_what_may_be_held_is_searched_for():
    stages = stages_of(memory=10**12)
    assert too_large(stages) is None
    assert np.isfinite(held_bytes(stages))
    planner = Planner(spec(), cluster(2), profile=profile())
    space = planner.space(8, SearchSpace(offload=("optimizer",)))
    # Nothing is known of these hosts, which may hold anything; of so little on the devices alone it is too much.
    stages = planner.stages(space, 10)
    assert np.isinf(held_bytes(stages))
    assert too_large(stages) is None
    assert too_large(planner.stages(planner.space(8, SearchSpace(offload=())), 10)) is not None
