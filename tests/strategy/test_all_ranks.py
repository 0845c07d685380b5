from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import InfeasibleError, PlanError
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import Exclusion, LiveTensor, ModuleMap, ParameterUse
from lightning_mist.strategy import all_ranks
from lightning_mist.strategy.all_ranks import on_rank_zero, same_everywhere
from lightning_mist.strategy.planning.local_machine import alike, joined

MAP = ModuleMap(step="training_step", blocks=("a", "b"), outputs=(), cuts=((),), parameters=())


@pytest.mark.usefixtures("single_rank")
def test_work_of_rank_zero_gives_its_result_or_its_error():
    assert on_rank_zero(lambda: 5) == 5

    def fail():
        raise InfeasibleError("nothing fits")

    with pytest.raises(InfeasibleError, match="nothing fits"):
        on_rank_zero(fail)


@pytest.mark.usefixtures("single_rank")
def test_an_error_that_cannot_travel_is_told_in_words():
    class Odd(Exception):
        pass  # a local class: no other process could read it

    def fail():
        raise Odd("seven")

    with pytest.raises(RuntimeError, match="Odd: seven"):
        on_rank_zero(fail)


def _seen(kind):
    """What both ranks make of what rank 1 found otherwise than rank 0."""
    use = ParameterUse(name="w", slots=(("a", "w", (0,)),), shape=(2,), dtype="float32", requires_grad=True)
    live = LiveTensor(key="x", shape=(4, 3), dtype="float32", requires_grad=True, batch_dim=0)
    found = replace(MAP, parameters=(use,), cuts=((live,),), batch_rows=4)
    other = {
        "size": {"batch_rows": 2, "cuts": ((replace(live, shape=(2, 3)),),)},
        "module": {"blocks": ("a", "c")},
        "frozen": {"parameters": (replace(use, requires_grad=False),)},
        "use": {"parameters": (replace(use, slots=(("a", "w", (1,)),)),), "leaves_out": True, "writes": "seen"},
        "value": {"cuts": ((replace(live, key="y"),),), "indexes_by_mask": True},
        "form": {"cuts": ((replace(live, requires_grad=False),),)},
        "reason": {"exclusions": (Exclusion(feature="checkpointing", reason="no"),), "leaking_blocks": (1,)},
    }
    try:
        return same_everywhere(replace(found, **other[kind]) if dist.get_rank() == 1 else found)
    except PlanError as error:
        return str(error)


def test_what_ranks_find_on_their_own_batches_is_joined(gloo_workers):
    found = {kind: gloo_workers.run(2, _seen, kind) for kind in ("size", "use", "value", "form", "reason")}
    assert [one.cuts[0][0].shape for one in found["size"]] == [(4, 3), (2, 3)]
    for kind, (first, second) in found.items():
        assert kind == "size" or replace(first, cuts=()) == replace(second, cuts=())
    used, other = found["use"][0], found["value"][0]
    assert used.parameters[0].regions == (0, 1)
    assert (used.leaves_out, used.writes, used.exclusions) == (True, "seen", ())
    assert other.indexes_by_mask
    for kind in ("value", "form"):
        assert {item.feature for item in found[kind][1].exclusions} == {"pipeline", "tensor", "context"}
    assert (found["reason"][0].excludes("checkpointing"), found["reason"][0].leaking_blocks) == (("no",), (1,))


@pytest.mark.parametrize("kind", ["module", "frozen"])
def test_ranks_that_see_another_module_are_named(gloo_workers, kind):
    first, second = gloo_workers.run(2, _seen, kind)
    assert first == second
    assert "ranks [1] see another module than rank 0" in first


def _cluster_on(names):
    return joined(all_ranks.of_all_ranks(parse_cluster(f"2x{names[dist.get_rank()]}")))


def test_ranks_know_each_other_s_devices(gloo_workers):
    assert gloo_workers.run(2, _cluster_on, ("L4", "L4")) == [parse_cluster("2xL4")] * 2
    assert gloo_workers.run(2, _cluster_on, ("L4", "T4")) == [parse_cluster("1xL4+1xT4")] * 2
    assert gloo_workers.run(2, _cluster_on, ("L4", "L4:20GiB")) == [parse_cluster("2xL4:20GiB")] * 2


def test_unlike_devices_are_described_by_nodes_with_a_way_out():
    fast, slow = parse_cluster("3x8xA100-40"), parse_cluster("3x8xV100-32")
    found = joined([*[fast] * 8, *[slow] * 16])
    assert found == parse_cluster("8xA100-40+2x8xV100-32")
    with pytest.raises(
        PlanError, match=r"ranks 0 to 7 on A100-40; ranks 8 to 23 on V100-32\. .* --cluster 1x8xA100-40\+2x"
    ):
        alike(found)
    assert alike(fast) == fast


def test_the_least_of_the_hosts_memory_counts_and_unlike_devices_of_a_node_share_it():
    first, second, other = (
        replace(parse_cluster(f"1x8x{name}"), host_memory_bytes=size)
        for name, size in (("L4", 900), ("L4", 800), ("T4", 800))
    )
    unknown = replace(first, host_memory_bytes=None)
    assert joined([first] * 8 + [second] * 8).host_memory_bytes == 800
    assert joined([unknown] * 16).host_memory_bytes is None
    assert [part.host_memory_bytes for part in joined([first] * 4 + [other] * 4).parts] == [450, 400]


@pytest.mark.usefixtures("single_rank")
def test_what_does_not_lie_together_in_memory_travels_too(monkeypatch):
    """As NCCL asks for it."""
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    module.register_buffer("row", torch.ones(1, 2).expand(3, 2))
    sent = []

    def broadcast(tensor, source):
        assert tensor.is_contiguous()
        sent.append(tensor.numel())
        tensor.add_(1)

    monkeypatch.setattr(all_ranks.dist, "broadcast", broadcast)
    all_ranks.same_start(module, ())
    assert sorted(sent) == [2, 3, 6]
    assert torch.equal(module.weight, torch.arange(1.0, 7.0).reshape(2, 3).t())
    assert torch.equal(module.row, torch.full((3, 2), 2.0))
