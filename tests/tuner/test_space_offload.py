from dataclasses import replace

import pytest

from lightning_mist.hardware import MixedCluster
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space.applied_space import apply, with_offload
from tests.specs import cluster, profile, spec

COPYING = replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)
GPUS, CPUS = cluster(2, kind="cuda"), cluster(2)


@pytest.mark.parametrize(
    ("machine", "profiles", "asked", "settled", "noted"),
    [
        (GPUS, (COPYING,), None, OFFLOADED, False),
        (GPUS, (COPYING,), ("optimizer",), ("optimizer",), False),
        (GPUS, (COPYING,), (), (), False),
        (GPUS, (profile(),), None, (), True),
        (GPUS, (profile(),), (), (), False),
        (CPUS, (profile(),), None, (), False),
        (CPUS, (profile(),), ("optimizer",), ("optimizer",), False),  # told to price what copies there would cost
        (MixedCluster(parts=(GPUS, GPUS)), (COPYING, COPYING), None, OFFLOADED, False),
        (MixedCluster(parts=(GPUS, GPUS)), (COPYING, profile()), None, (), True),
    ],
)
def test_what_is_offloaded_by_default_is_what_there_are_hosts_for(machine, profiles, asked, settled, noted):
    space = apply(SearchSpace(offload=asked), spec(4), machine.world_size, 8)
    found = with_offload(space, machine, profiles, spec(4).module_map)
    assert found.search.offload == settled
    assert any("how fast devices copy" in note for note in found.notes) == noted
    assert replace(found, search=space.search, notes=space.notes) == space


@pytest.mark.parametrize(
    ("feature", "left"),
    [
        ("shards", ()),
        ("offloaded_parameters", ("gradients", "optimizer", "activations")),
        ("offloaded_activations", ("parameters", "gradients", "optimizer")),
        ("pipeline", OFFLOADED),
    ],
)
def test_what_has_to_stay_on_the_device_is_not_looked_at_elsewhere(feature, left):
    network = spec(4, exclusions=[(feature, "a hook reads it")])
    found = with_offload(apply(SearchSpace(), network, 2, 8), GPUS, (COPYING,), network.module_map)
    assert found.search.offload == left
    missing = ", ".join(kind for kind in OFFLOADED if kind not in left)
    assert (f"without offload of {missing}: a hook reads it" in found.notes) == bool(missing)
