import pickle
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from lightning_mist.errors import InfeasibleError, PlanError
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import Exclusion, LiveTensor, ModuleMap, ParameterUse
from lightning_mist.strategy import ranks
from lightning_mist.strategy.planning.local_machine import alike, joined
from lightning_mist.strategy.ranks import ActingRank, Progress, on_rank_zero, same_everywhere

MAP = ModuleMap(step="training_step", blocks=("a", "b"), cuts=((),), parameters=())


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


def _printed(where):
    """Whether this rank prints an error that fails work on some ranks, or on rank 0 for all."""
    seen, before = [], sys.excepthook
    sys.excepthook = lambda kind, value, trace: seen.append(value)

    def work():
        if dist.get_rank() in where:
            raise PlanError(where[dist.get_rank()])

    try:
        (ranks.everywhere if 1 in where else on_rank_zero)(work)
    except PlanError as error:
        sys.excepthook(type(error), error, None)
        sys.excepthook(PlanError, PlanError("another"), None)
    finally:
        sys.excepthook = before
    return [str(error) for error in seen]


def test_an_error_of_all_ranks_is_printed_by_one(gloo_workers):
    assert gloo_workers.run(2, _printed, {0: "no"}) == [["no", "another"], ["another"]]
    assert gloo_workers.run(2, _printed, {1: "no"}) == [["another"], ["no", "another"]]
    assert gloo_workers.run(2, _printed, {0: "no", 1: "no"}) == [["no", "another"], ["another"]]
    assert gloo_workers.run(2, _printed, {0: "no", 1: "nor"}) == [["no", "another"], ["nor", "another"]]


def _seen(kind):
    """What both ranks make of what rank 1 found otherwise than rank 0."""
    use = ParameterUse(name="w", slots=(("a", "w", (0,)),), shape=(2,), dtype="float32", requires_grad=True)
    live = LiveTensor(key="x", shape=(4, 3), dtype="float32", requires_grad=True, batch_dim=0)
    found = replace(MAP, parameters=(use,), cuts=((live,),), batch_rows=4, even_shards=True, tokens=8)
    other = {
        "size": {"batch_rows": 2, "cuts": ((replace(live, shape=(2, 3)),),)},
        "module": {"blocks": ("a", "c")},
        "frozen": {"parameters": (replace(use, requires_grad=False),)},
        "use": {"parameters": (replace(use, slots=(("a", "w", (1,)),)),), "leaves_out": True, "writes": "seen"},
        "value": {"cuts": ((replace(live, key="y"),),), "indexes_by_mask": True},
        "form": {"cuts": ((replace(live, requires_grad=False),),)},
        "reason": {"exclusions": (Exclusion(feature="checkpointing", reason="no"),), "leaking_blocks": (1,)},
        "shards": {"even_shards": False, "tokens": None},
    }
    try:
        return same_everywhere(replace(found, **other[kind]) if dist.get_rank() == 1 else found)
    except PlanError as error:
        return str(error)


def test_what_ranks_find_on_their_own_batches_is_joined(gloo_workers):
    found = {kind: gloo_workers.run(2, _seen, kind) for kind in ("size", "use", "value", "form", "reason", "shards")}
    assert [one.cuts[0][0].shape for one in found["size"]] == [(4, 3), (2, 3)]
    for kind, (first, second) in found.items():
        assert kind == "size" or replace(first, cuts=()) == replace(second, cuts=())
    used, other = found["use"][0], found["value"][0]
    assert used.parameters[0].regions == (0, 1)
    assert (used.leaves_out, used.writes, used.exclusions) == (True, "seen", ())
    assert other.indexes_by_mask
    assert [one[1].even_shards for one in (found["use"], found["shards"])] == [True, False]
    assert [one[0].tokens for one in (found["use"], found["shards"])] == [8, None]
    for kind in ("value", "form"):
        assert {item.feature for item in found[kind][1].exclusions} == {"pipeline", "tensor", "context"}
    assert (found["reason"][0].excludes("checkpointing"), found["reason"][0].leaking_blocks) == (("no",), (1,))


@pytest.mark.parametrize("kind", ["module", "frozen"])
def test_ranks_that_see_another_module_are_named(gloo_workers, kind):
    first, second = gloo_workers.run(2, _seen, kind)
    assert first == second
    assert "ranks [1] see another module than rank 0" in first


def _cluster_on(names):
    return joined(ranks.of_all_ranks(parse_cluster(f"2x{names[dist.get_rank()]}")))


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

    monkeypatch.setattr(ranks.dist, "broadcast", broadcast)
    ranks.same_start(module, ())
    assert sorted(sent) == [2, 3, 6]
    assert torch.equal(module.weight, torch.arange(1.0, 7.0).reshape(2, 3).t())
    assert torch.equal(module.row, torch.full((3, 2), 2.0))


class Base:
    global_rank, local_rank, node_rank, num_processes = 1, 1, 0, 2

    @property
    def root_device(self):
        return f"cuda:{self.local_rank}"


class Strategy(ActingRank, Base):
    pass


def seen_ranks(strategy):
    return strategy.global_rank, strategy.local_rank, strategy.node_rank


def test_a_strategy_speaks_for_the_owner_of_rows(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    strategy = Strategy()
    assert seen_ranks(strategy) == (1, 1, 0)
    strategy.act_for(2)
    assert seen_ranks(strategy) == (2, 0, 1)
    assert rank_zero_only.rank == 2
    # It computes where it computes.
    assert strategy.root_device == "cuda:1"
    assert strategy.local_rank == 0
    strategy.act_for(None)
    assert seen_ranks(strategy) == (1, 1, 0)
    assert rank_zero_only.rank == 1


def test_a_rank_that_speaks_prints_what_it_is_told(capsys):
    with Progress(enabled=True) as progress:
        progress.say("layers [0, 4] of /a/b[c]")
        progress.update("first", 0.1)
        progress.update("first", 0.5)
        progress.update("second", 0.6)
        progress.details("a [bold]table[/]")
    shown = capsys.readouterr().err
    assert "layers [0, 4] of /a/b[c]" in shown
    assert shown.count("first") == 1
    assert "60% second" in shown
    assert "a [bold]table[/]" in shown


@pytest.mark.parametrize("call", [lambda p: p.say("x"), lambda p: p.update("x", 1.0), lambda p: p.details("x")])
def test_the_others_keep_silent(capsys, call):
    with Progress(enabled=False) as progress:
        call(progress)
    assert capsys.readouterr().err == ""


def test_what_users_need_not_know_is_said_only_where_that_is_asked_for(capsys):
    with Progress(enabled=True, verbose=False) as progress:
        progress.say("why")
        progress.update("how far", 0.5)
        progress.details("where")
        progress.tell("what")
        progress.conclude("in short", "at length")
    assert capsys.readouterr().err.splitlines() == ["mist what", "mist in short"]
    with Progress(enabled=True, verbose=True) as progress:
        progress.details("where")
        progress.conclude("in short", "at length")
    assert capsys.readouterr().err.splitlines() == ["where", "at length"]


def test_it_can_be_pickled():
    progress = Progress(enabled=True)
    progress.say("x")
    assert isinstance(pickle.loads(pickle.dumps(progress)), Progress)
