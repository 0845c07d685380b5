"""What ranks write into a directory is what a file has, and ranks of other plans read what they need of it."""

import copy
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.parity.cell import CLIP_NORM, on_all_ranks, subject, train_batch
from benchmarks.parity.plans import make_plan
from lightning_mist.leaves import Wrapping, put_together, take_apart
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.strategy.checkpoints.directory import StoredDirectory, read_directory, states_of
from lightning_mist.strategy.checkpoints.shards import (
    Shards,
    copied,
    model_shards,
    named_state,
    names_in_order,
    optimizer_shards,
    saved_parts,
)
from tests.integration.parity import make_optimizer
from tests.integration.test_resume import PLANS
from tests.packed import PACKED
from tests.strategy.checkpoints.kill_points import kill_points
from tests.strategy.checkpoints.writing import write_directory
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

META = {"pytorch-lightning_version": "2.6.0", "epoch": 3}


def trained(engine, model, *, values=None, load=None, make=make_optimizer):
    """A step from given values and state."""
    optimizer = make(engine.module)
    if values is not None:
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                parameter.copy_(values[name])
    engine.take_optimizer(optimizer)
    engine.hollow()
    if load is not None:
        load(engine)
    train_batch(engine, model.batches[0][engine.rank])
    engine.clip_by_norm(optimizer, CLIP_NORM)
    optimizer.step()
    complete(engine.executor.gather_parameters())


def saved(engine, model, **more):
    """What a rank writes after a step, and on rank 0 what a file would have."""
    trained(engine, model, **more)
    is_first = engine.rank == 0
    shards = {
        "model": model_shards(engine.module, engine, is_first=is_first),
        "optimizer_0": optimizer_shards(engine, is_first=is_first),
    }
    shards = copied(shards)
    order = [engine.canonical_name(parameter) for group in engine.owned().cut.groups for parameter in group]
    return shards, (engine.module_values(), named_state(engine.optimizer_state(), order))


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted) or sorted(found) == sorted(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for mine, other in zip(found, wanted, strict=True):
            assert_same(mine, other)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, Wrapping):
        assert vars(found) == vars(wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("first", tiered(PLANS, ("data parallel", "hybrid, ZeRO 3")))
def test_a_directory_has_what_a_file_has_and_another_plan_goes_on_from_it(tmp_path, first):
    names = list(PLANS)
    name = ("nano_even", "lora_llama")[names.index(first) % 2]
    model, path = subject(name, torch.float64), tmp_path / "one.ckpt"
    layers = len(model.module_map.blocks)
    everything = on_all_ranks(model, make_plan(PLANS[first], layers), lambda engine: saved(engine, model))
    values, state = everything[0][1]
    write_directory(path, [shards for shards, _ in everything], META)

    content = read_directory(path, True)
    assert {key: content[key] for key in META} == META
    assert list(content["state_dict"]) == list(model.module.state_dict())
    module = copy.deepcopy(model.module)
    module.load_state_dict(content["state_dict"])
    assert_same({name: p.detach() for name, p in module.named_parameters()}, values)
    (stored,) = content["optimizer_states"]
    assert_same(stored(), state)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same(whole, {"model": content["state_dict"], "optimizer_0": state})

    def reread(engine):
        engine.load_optimizer_state(stored(partial(saved_parts, engine.owned().cut)))

    def handed(engine):
        engine.load_optimizer_state(copy.deepcopy(state))

    plan = make_plan(PLANS[names[(names.index(first) + 3) % len(names)]], layers)
    found, wanted = (
        on_all_ranks(model, plan, lambda engine, load=load: goes_on(engine, model, values, load))[0]
        for load in (reread, handed)
    )
    assert_same(found, wanted)


def goes_on(engine, model, values, load, **more):
    trained(engine, model, values=values, load=load, **more)
    return {"values": engine.module_values(), "state": engine.optimizer_state()}


@pytest.mark.parametrize("name", ["in a class", "under a key"])
def test_state_of_classes_is_in_a_directory_what_it_is_in_a_file(tmp_path, name):
    """Written by two stages with ZeRO-1, and taken apart; read by ranks that move it, and by one that has no plan."""
    model, path = subject("nano_even", torch.float64), tmp_path / "one.ckpt"
    model = replace(model, module_map=replace(model.module_map, even_shards=False))
    layers = len(model.module_map.blocks)

    def make(module):
        return PACKED[name](module.parameters())

    everything = on_all_ranks(
        model, make_plan(PLANS["two by two"], layers), lambda engine: saved(engine, model, make=make)
    )
    values, state = everything[0][1]
    write_directory(path, [shards for shards, _ in everything], META)
    (stored,) = read_directory(path, False)["optimizer_states"]
    assert_same(stored(), state)
    make(copy.deepcopy(model.module)).load_state_dict(put_together(stored()))
    whole = put_together(state)

    def reread(engine):
        engine.load_optimizer_state(put_together(stored(partial(saved_parts, engine.owned().cut))))

    def handed(engine):
        numbers = {key: number for number, key in enumerate(key for g in whole["param_groups"] for key in g["params"])}
        renumbered = {numbers[key]: entry for key, entry in whole["state"].items()}
        groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in whole["param_groups"]]
        engine.load_optimizer_state({**whole, "state": renumbered, "param_groups": groups})

    found, wanted = (
        on_all_ranks(
            model,
            make_plan(PLANS["offloaded"], layers),
            lambda engine, load=load: goes_on(engine, model, values, load, make=make),
        )[0]
        for load in (reread, handed)
    )
    assert_same(take_apart(found), take_apart(wanted))


class Net(nn.Module):
    """With a buffer and something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.note = nn.Linear(3, 2), {"seen": 1}
        self.register_buffer("mean", torch.zeros(2))

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_every_rank_of_plain_data_parallelism_writes_its_share_and_rank_0_what_only_it_has(tmp_path):
    modules = [Net(), Net()]
    modules[1].load_state_dict(modules[0].state_dict())
    modules[1].mean.fill_(7.0)
    modules[1].note = {"seen": 2}
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    states = []
    for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
        module.linear(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        states.append(
            {
                "model": model_shards(module, None, is_first=rank == 0),
                "optimizer_0": named_state(optimizer.state_dict(), names_in_order(optimizer, module)),
            }
        )
    write_directory(tmp_path / "one.ckpt", states, META)
    assert sorted(os.listdir(tmp_path / "one.ckpt")) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    content = read_directory(tmp_path / "one.ckpt", True)
    assert_same(dict(content["state_dict"]), dict(modules[0].state_dict()))
    state = content["optimizer_states"][0]()
    assert state["param_groups"][0]["params"] == ["linear.weight", "linear.bias"]
    # By the names in place of numbers torch's own optimizers take it, too.
    optimizers[1].load_state_dict(state)
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_a_directory_is_the_old_or_the_new_one(tmp_path):
    path, seen = tmp_path / "last.ckpt", []

    def content(number):
        shape, half = (4, 3), torch.full((2, 3), float(number))
        halves = [Shards(shape, {(0, 0): half}), Shards(shape, {(2, 0): half})]
        more = [{"optimizer_0": {"state": {}, "param_groups": [{"lr": number}]}}, {}]
        return [{"model": {"weight": shards}, **rest} for shards, rest in zip(halves, more, strict=True)]

    def write(number):
        write_directory(path, content(number), {**META, "epoch": number})

    def number_of():
        found = read_directory(path, True)
        numbers = {found["epoch"], found["optimizer_states"][0]()["param_groups"][0]["lr"]}
        (number,) = numbers | set(found["state_dict"]["weight"].unique().tolist())
        return number

    for _ in kill_points(lambda: write(2), lambda: write(1)):
        seen.append(number_of())
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".partial-")] == ["last.ckpt"]
    assert number_of() == 2
    # How often torch writes is its version's.
    assert len(seen) >= 10
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    write(3)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_goes_into_a_directory_is_of_the_moment_it_was_asked_for(tmp_path):
    states, meta = states_of({"state_dict": {"weight": torch.zeros(2)}, "optimizer_states": [], **META})
    assert meta == META
    staged = copied({"part": Shards((2,), {(0,): states["model"]["weight"]}), "list": [states["model"]["weight"], 1]})
    states["model"]["weight"].fill_(5.0)
    assert staged["part"].pieces[0,].tolist() == staged["list"][0].tolist() == [0.0, 0.0]


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    values = {name: torch.full((2,), float(index)) for index, name in enumerate("abc")}
    groups = [{"params": list("abc"), "lr": 0.1}]
    state = {"state": {name: {"momentum": value, "step": 3} for name, value in values.items()}, "param_groups": groups}
    write_directory(tmp_path / "one.ckpt", [{"model": values, "optimizer_0": state}], META)
    stored = StoredDirectory(tmp_path / "one.ckpt", True)
    found = stored.optimizer(0, lambda groups: {groups[0]["params"][1]: None})
    assert_same(found, {**state, "state": {"b": state["state"]["b"]}})
    assert stored.optimizer(0, lambda groups: {})["state"] == {}


def mappings_of(path):
    """Address ranges at which a folder's files are mapped into this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    return [tuple(int(address, 16) for address in line[0].split("-")) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not say what is mapped")
def test_weights_in_one_piece_stay_in_the_directory_until_they_are_read(tmp_path):
    path = tmp_path / "one.ckpt"
    values = {"sixteen": torch.arange(6).bfloat16(), "turned": torch.rand(3, 5).t(), "one": torch.tensor(2.5)}
    halves = [Shards((4,), {(2 * rank,): torch.full((2,), float(rank))}) for rank in (0, 1)]
    states = [{"model": {**values, "halved": halves[0], "none": torch.empty(0, 3)}}, {"model": {"halved": halves[1]}}]
    write_directory(path, states, META)
    found = read_directory(path, True)["state_dict"]
    wanted = {**values, "halved": torch.tensor([0.0, 0.0, 1.0, 1.0]), "none": torch.empty(0, 3)}
    assert_same({name: found[name] for name in wanted}, wanted)
    ranges = mappings_of(path)
    mapped = {name for name, value in found.items() if any(a <= value.data_ptr() < b for a, b in ranges)}
    assert mapped == set(values)
    # What is changed is changed here, and not for those who read it next.
    found["sixteen"].fill_(7.0)
    assert_same(read_directory(path, True)["state_dict"]["sixteen"], values["sixteen"])
