import copy

import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.leaves import CLASS, Wrapping, plain_leaves, take_apart
from lightning_mist.plan import ParameterSplit
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.parameters.optimizer_cut import (
    clip_by_norm,
    clip_by_value,
    gather_optimizer_state,
    global_grad_norm,
    load_full_optimizer_state,
    own_state_dict,
    restrict_optimizer,
)
from lightning_mist.runtime.parameters.parameter_parts import Part, parts_of, speakers_of
from tests.memory_transport import InMemoryWorld, drive
from tests.packed import PACKED, Packed, UnderAKey
from tests.plan.test_mesh import make_map, make_plan
from tests.runtime.parameters.test_parameter_parts import split_map, split_plan

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw loop": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5),
}


def _module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 30), nn.LayerNorm(30), nn.Linear(30, 4))


def _groups(module):
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _step(module, optimizer, seed):
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


def _assert_equal(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for number, entry in a["state"].items():
        assert entry.keys() == b["state"][number].keys()
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][number][key])), (number, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_pieces_is_the_state_of_the_whole(name):
    whole = _module()
    optimizer = OPTIMIZERS[name](_groups(whole))
    modules = [copy.deepcopy(whole) for _ in range(3)]
    cuts = []
    for index, module in enumerate(modules):
        part = OPTIMIZERS[name](_groups(module))
        # Rank 2 owns nothing of the second group: only matrices.
        owned = [p for i, p in enumerate(module.parameters()) if (2 if i == 0 else i % 2) == index]
        cuts.append(restrict_optimizer(part, owned))
    for seed in range(3):
        _step(whole, optimizer, seed)
        for module, cut in zip(modules, cuts, strict=True):
            _step(module, cut.optimizer, seed)
        _share(modules)
    world = InMemoryWorld(3)
    gathered = drive([gather_optimizer_state(cut, t) for cut, t in zip(cuts, world.transports, strict=True)])
    assert gathered[1] is gathered[2] is None
    _assert_equal(gathered[0], optimizer.state_dict())


def _gathered(cuts, **more):
    world = InMemoryWorld(len(cuts))
    return drive([gather_optimizer_state(cut, t, **more) for cut, t in zip(cuts, world.transports, strict=True)])[0]


def _assert_same(found, wanted):
    """Layout, classes, types and bits."""
    found, wanted = take_apart(found), take_apart(wanted)
    for (path, one), (other_path, other) in zip(plain_leaves(found), plain_leaves(wanted), strict=True):
        assert path == other_path
        assert one.dtype == other.dtype
        assert torch.equal(one, other), path
    assert _rest(found) == _rest(wanted)


def _rest(value):
    if isinstance(value, dict):
        return {key: _rest(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rest(item) for item in value]
    return value.cls if isinstance(value, Wrapping) else None if isinstance(value, torch.Tensor) else value


def _pieces(make, module=None):
    """A whole module and two copies of it of which each rank updates every other parameter; all stepped."""
    whole = module or nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 30), nn.Linear(30, 4)).double()
    modules = [copy.deepcopy(whole) for _ in range(2)]
    optimizer = make(_groups(whole))
    cuts = [
        restrict_optimizer(make(_groups(module)), list(module.parameters())[index::2])
        for index, module in enumerate(modules)
    ]
    _step_alike(whole, optimizer, modules, cuts, range(3))
    return whole, optimizer, modules, cuts


def _step_alike(whole, optimizer, modules, cuts, seeds):
    for seed in seeds:
        _give_gradients(whole, seed)
        optimizer.step()
        for module, cut in zip(modules, cuts, strict=True):
            _give_gradients(module, seed)
            cut.optimizer.step()


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_state_has_the_layout_of_its_class(name, is_apart):
    """And goes on from there: loaded with the rest, or one parameter after the other."""
    whole, optimizer, modules, cuts = _pieces(PACKED[name])
    state = _gathered(cuts)
    _assert_same(state, optimizer.state_dict())
    again = PACKED[name](_groups(whole))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh = []
    for module, cut in zip(modules, cuts, strict=True):
        owned = [p for p in cut.numbers if p in cut.owned]
        fresh.append(restrict_optimizer(PACKED[name](_groups(module)), owned))
        told = []
        load_full_optimizer_state(fresh[-1], state, apart=set(owned) if is_apart else (), loaded=told.extend)
        assert told == (owned if is_apart else [])
        assert set(fresh[-1].optimizer.state) == set(owned)
        assert getattr(fresh[-1].optimizer, "initialized", True)
    _step_alike(whole, again, modules, fresh, range(3, 5))
    _assert_same(_gathered(fresh), again.state_dict())
    for index, parameters in enumerate(zip(*(m.parameters() for m in (whole, *modules)), strict=True)):
        assert torch.equal(parameters[0], parameters[1 + index % 2])


def test_tables_that_parameters_share_travel_once():
    *_, cuts = _pieces(UnderAKey)
    state = _gathered(cuts)["state"]
    tables = [entry["__packed__"]["qmap1"] for entry in state.values() if "__packed__" in entry]
    assert len(tables) == 2
    assert len({table.data_ptr() for table in tables}) <= 2
    whole = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).double()
    *_, cuts = _pieces(UnderAKey, whole)
    tables = [entry["__packed__"]["qmap1"] for entry in _gathered(cuts)["state"].values() if "__packed__" in entry]
    assert len(tables) == 2
    assert len({table.data_ptr() for table in tables}) == 1


class Counting(torch.optim.SGD):
    """Counts steps of groups that it updates, as NVIDIA's fused optimizers do, and keeps more than it should."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                group["count"] = group.get("count", 0) + 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), **getattr(self, "more", {})}


def test_options_of_a_group_are_those_of_a_rank_that_updates_it():
    whole = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 30)).double()
    _, optimizer, _, cuts = _pieces(lambda groups: Counting(groups, lr=0.1, momentum=0.9), whole)
    # Rank 0 has the matrices, and rank 1 the vectors.
    assert "count" not in cuts[0].optimizer.param_groups[1]
    assert optimizer.param_groups[1]["count"] == 3
    _assert_same(_gathered(cuts), optimizer.state_dict())


def test_what_a_class_saves_beside_must_be_the_same_on_all_ranks():
    *_, cuts = _pieces(lambda groups: Counting(groups, lr=0.1))
    for cut in cuts:
        cut.optimizer.more = {"mean": torch.tensor([1.0, float("nan")]), "names": {"a", "b"}}
    assert torch.equal(_gathered(cuts)["mean"], cuts[0].optimizer.more["mean"]) is False  # NaN
    cuts[1].optimizer.more = {"mean": torch.tensor([1.0, 2.0]), "names": {"a", "b"}}
    with pytest.raises(PlanError, match=r"another mean on rank 1 than on rank 0.*keep it by parameter"):
        _gathered(cuts)


def test_hooks_around_state_dicts_see_the_numbers_of_the_whole():
    def rename(optimizer, found):
        return {**found, "state": {f"number {key}": entry for key, entry in found["state"].items()}}

    def back(optimizer, found):
        return {**found, "state": {int(str(key).split()[-1]): entry for key, entry in found["state"].items()}}

    def make(groups):
        made = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        made.register_state_dict_post_hook(rename)
        made.register_load_state_dict_pre_hook(back)
        return made

    _, optimizer, _, cuts = _pieces(make)
    state = _gathered(cuts)
    assert sorted(state["state"]) == [f"number {number}" for number in range(6)]
    for cut in cuts:
        before = {p: dict(entry) for p, entry in cut.optimizer.state.items()}
        cut.optimizer.state.clear()
        load_full_optimizer_state(cut, state)
        assert set(cut.optimizer.state) == set(before)
        for parameter, entry in before.items():
            assert torch.equal(cut.optimizer.state[parameter]["momentum_buffer"], entry["momentum_buffer"])
            assert optimizer.param_groups


def _share(modules):
    """After each step every rank has what the owners updated."""
    with torch.no_grad():
        for i, copies in enumerate(zip(*(module.parameters() for module in modules), strict=True)):
            owner = 2 if i == 0 else i % 2
            for parameter in copies:
                parameter.copy_(copies[owner])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_piece_continues_from_the_state_of_the_whole(name):
    whole = _module()
    optimizer = OPTIMIZERS[name](_groups(whole))
    _step(whole, optimizer, 0)
    piece = copy.deepcopy(whole)
    part = OPTIMIZERS[name](_groups(piece))
    owned = list(piece.parameters())[::2]
    cut = restrict_optimizer(part, owned)
    load_full_optimizer_state(cut, copy.deepcopy(optimizer.state_dict()))
    assert set(part.state) == set(owned)
    _step(whole, optimizer, 1)
    _step(piece, part, 1)
    for i, (p, q) in enumerate(zip(whole.parameters(), piece.parameters(), strict=True)):
        assert torch.equal(p, q) == (i % 2 == 0)


def test_restricting_keeps_groups_for_schedulers_and_can_be_undone():
    module = _module()
    optimizer = OPTIMIZERS["adamw"](_groups(module))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    _step(module, optimizer, 0)
    before = [list(group["params"]) for group in optimizer.param_groups]
    lists = [group["params"] for group in optimizer.param_groups]
    owned = list(module.parameters())[:1]
    cut = restrict_optimizer(optimizer, owned)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    assert list(optimizer.state) == owned
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-2
    cut.restore()
    for group, parameters, same in zip(optimizer.param_groups, before, lists, strict=True):
        assert group["params"] is same
        assert all(p is q for p, q in zip(group["params"], parameters, strict=True))


def test_a_group_that_was_added_since_is_left_alone():
    module, other = _module(), _module()
    optimizer = OPTIMIZERS["adamw"](_groups(module))
    before = [list(group["params"]) for group in optimizer.param_groups]
    cut = restrict_optimizer(optimizer, list(module.parameters())[:1])
    optimizer.add_param_group({"params": list(other.parameters())})
    cut.restore()
    wanted = [*before, list(other.parameters())]
    for group, parameters in zip(optimizer.param_groups, wanted, strict=True):
        assert all(p is q for p, q in zip(group["params"], parameters, strict=True))


def test_names_of_parameters_are_cut_and_restored():
    module = _module()
    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.1, momentum=0.9)
    whole = [name for name, _ in module.named_parameters()]
    cut = restrict_optimizer(optimizer, [module[1].weight])
    assert optimizer.param_groups[0]["param_names"] == ["1.weight"]
    full = own_state_dict(cut)
    assert full["param_groups"][0]["param_names"] == whole
    load_full_optimizer_state(cut, full)
    assert optimizer.param_groups[0]["param_names"] == ["1.weight"]
    cut.restore()
    assert optimizer.param_groups[0]["param_names"] == whole


def test_groups_show_what_is_asked_for_and_then_what_they_had():
    module = _module()
    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.1)
    whole = [name for name, _ in module.named_parameters()]
    cut = restrict_optimizer(optimizer, [module[1].weight])
    (group,) = optimizer.param_groups
    with cut.showing(lambda _: True):
        assert group["param_names"] == whole
        assert all(p is q for p, q in zip(group["params"], module.parameters(), strict=True))
        with cut.showing(lambda parameter: parameter is module[0].bias):
            assert group["param_names"] == ["0.bias"]
            assert group["params"] == [module[0].bias]
        assert group["param_names"] == whole
    assert group["param_names"] == ["1.weight"]
    assert group["params"] == [module[1].weight]


def test_state_of_another_layout_is_refused():
    module = _module()
    cut = restrict_optimizer(OPTIMIZERS["adamw"](_groups(module)), [module[0].weight])
    with pytest.raises(ValueError, match=r"groups of \[8\] parameters, this one of \[3, 5\]"):
        load_full_optimizer_state(cut, OPTIMIZERS["adamw"](module.parameters()).state_dict())


def _split_modules():
    """A module, and for each of two ranks one with its parts of both inner matrices and their biases."""
    whole = _module()
    splits = {
        "0.weight": ParameterSplit(name="0.weight", dim=0, factors=((3, False), (10, True))),
        "0.bias": ParameterSplit(name="0.bias", dim=0, factors=((3, False), (10, True))),
        "1.weight": ParameterSplit(name="1.weight", dim=1, factors=((3, False), (10, True))),
    }
    modules, parts = [], []
    for index in range(2):
        module = copy.deepcopy(whole)
        named = dict(module.named_parameters())
        mine = {
            named[name]: Part(split=split, degree=2, index=index, shape=tuple(named[name].shape))
            for name, split in splits.items()
        }
        for parameter, part in mine.items():
            parameter.data = part.take(parameter.detach())
        modules.append(module)
        parts.append(mine)
    return whole, modules, parts


def _give_gradients(module, seed, parts=None):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        part = (parts or {}).get(parameter)
        gradient = torch.randn(parameter.shape if part is None else part.shape, generator=generator).to(parameter)
        parameter.grad = gradient if part is None else part.take(gradient)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_parts_is_the_state_of_the_whole(name):
    whole, modules, parts = _split_modules()
    optimizer = OPTIMIZERS[name](_groups(whole))
    cuts = [
        restrict_optimizer(OPTIMIZERS[name](_groups(module)), list(module.parameters()), mine)
        for module, mine in zip(modules, parts, strict=True)
    ]

    def step(seed):
        _give_gradients(whole, seed)
        optimizer.step()
        for module, cut, mine in zip(modules, cuts, parts, strict=True):
            _give_gradients(module, seed, mine)
            cut.optimizer.step()

    step(0)
    step(1)
    world = InMemoryWorld(2)
    states = drive([gather_optimizer_state(cut, t) for cut, t in zip(cuts, world.transports, strict=True)])
    assert states[1] is None
    wanted = optimizer.state_dict()
    assert states[0]["param_groups"] == wanted["param_groups"]
    for number, entry in wanted["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(states[0]["state"][number][key], value, rtol=1e-6, atol=1e-8)
    # Loaded again, the parts go on as the whole does.
    for cut in cuts:
        cut.optimizer.state.clear()
        load_full_optimizer_state(cut, copy.deepcopy(wanted))
    step(2)
    for parameter, *split in zip(*(module.parameters() for module in (whole, *modules)), strict=True):
        for index, other in enumerate(split):
            part = parts[index].get(other)
            torch.testing.assert_close(other, parameter if part is None else part.take(parameter), rtol=1e-5, atol=1e-6)
    cuts[0].restore()
    assert set(cuts[0].optimizer.state) == set(modules[0].parameters()) - set(parts[0])


def _parts(state_of):
    """Cuts of both ranks' parts, with state made by a function of the parameter."""
    _, modules, parts = _split_modules()
    cuts = []
    for module, mine in zip(modules, parts, strict=True):
        cuts.append(restrict_optimizer(OPTIMIZERS["sgd"](_groups(module)), list(module.parameters()), mine))
        for parameter in module.parameters():
            cuts[-1].optimizer.state[parameter] = state_of(parameter)
    return cuts


def test_tables_are_neither_cut_nor_joined():
    cuts = _parts(lambda parameter: {"like": parameter.detach().clone(), "in": {"table": torch.arange(300.0)}})
    state = _gathered(cuts)
    assert tuple(state["state"][0]["like"].shape) == (30, 20)
    assert state["state"][0]["in"]["table"].shape == (300,)
    for cut in cuts:
        before = {p: entry["like"] for p, entry in cut.optimizer.state.items()}
        load_full_optimizer_state(cut, state)
        for parameter, entry in cut.optimizer.state.items():
            assert torch.equal(entry["like"], before[parameter])
            assert entry["in"]["table"].shape == (300,)


def test_what_is_per_block_is_refused_in_parts():
    """With the numbers: where a part is joined, and where state of the whole is to be cut."""
    cuts = _parts(lambda parameter: {"in": {"scales": torch.full((4,), float(parameter.shape[0] < 16))}})
    for cut, value in zip(cuts, (0.0, 1.0), strict=True):
        for entry in cut.optimizer.state.values():
            entry["in"]["scales"] = torch.full((4,), value)
    with pytest.raises(PlanError, match=r"4 entries of 'scales', which differ between parts, for 0\.weight of shape"):
        _gathered(cuts)
    whole = copy.deepcopy(cuts[0].optimizer.state_dict())
    sizes = [600, 900, 120, 30, 30, 30, 30, 4]
    for number, size in enumerate(sizes):
        whole["state"][number] = {"in": {"scales": torch.ones(size // 2)}}
    with pytest.raises(PlanError, match=r"300 entries of 'scales' for 0\.weight of shape \(30, 20\), of which"):
        load_full_optimizer_state(cuts[0], whole)


def test_classes_are_refused_in_parts():
    def state_of(parameter):
        codes = torch.zeros(parameter.shape, dtype=torch.uint8)
        return {"momentum": Packed(codes, torch.ones(1).double(), torch.ones(1))}

    cuts = _parts(state_of)
    with pytest.raises(PlanError, match=r"has a Packed of 300 entries for 0\.weight of shape \(30, 20\)"):
        _gathered(cuts)
    assert CLASS in take_apart(state_of(torch.ones(2)))["momentum"]


def test_state_from_the_start_becomes_that_of_a_part():
    """Adagrad makes its state at once, when parameters are still whole."""
    _, modules, parts = _split_modules()
    module, mine = modules[1], parts[1]
    for parameter, part in mine.items():
        parameter.data = torch.zeros(part.shape)
    optimizer = OPTIMIZERS["adagrad"](_groups(module))
    cut = restrict_optimizer(optimizer, list(module.parameters()), mine)
    for parameter, part in mine.items():
        parameter.data = part.take(parameter.detach())
        assert optimizer.state[parameter]["sum"].shape == parameter.shape
    assert optimizer.state[module[2].weight]["sum"].shape == (30,)
    _give_gradients(module, 0, mine)
    cut.optimizer.step()


def test_parts_that_the_optimizer_does_not_know_have_no_state():
    """Frozen parameters are shared out too."""
    _, modules, parts = _split_modules()
    cuts = []
    for index, (module, mine) in enumerate(zip(modules, parts, strict=True)):
        optimizer = OPTIMIZERS["adamw"]([module[0].weight, module[2].weight])
        cuts.append(restrict_optimizer(optimizer, [module[0].weight, module[2].weight], mine))
        _give_gradients(module, 0, mine)
        optimizer.step()
        assert len(optimizer.state) == 2, index
    world = InMemoryWorld(2)
    state, _ = drive([gather_optimizer_state(cut, t) for cut, t in zip(cuts, world.transports, strict=True)])
    assert [tuple(state["state"][number]["exp_avg"].shape) for number in range(2)] == [(30, 20), (30,)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("zero", [0, 1])
def test_norm_counts_each_part_once(norm_type, zero):
    plan, module_map = split_plan([(2, 2), (1, 1)], zero=zero), split_map(2, tied=(0, 1))
    gradients = {n: torch.randn(shape) for n, shape in SHAPES.items() if n not in ("frozen", "unused")}
    order = ["tied", "w1", "w0", "unused"]
    expected = torch.nn.utils.get_total_norm([gradients[n] for n in order if n in gradients], norm_type)
    world, runs = InMemoryWorld(plan.world_size), []
    for rank, transport in enumerate(world.transports):
        mesh, parts = make_mesh(plan, rank, module_map), parts_of(plan, rank, module_map)
        parameters = {n: nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
        for name, part in parts.items():
            parameters[name].data = part.take(parameters[name].detach())
        for item in mesh.held:
            if item.name in gradients:
                part = parts.get(item.name)
                value = gradients[item.name]
                parameters[item.name].grad = value.clone() if part is None else part.take(value)
        speakers = speakers_of(plan, mesh.parameters, module_map)
        runs.append(global_grad_norm(mesh, parameters, speakers, transport, names=order, norm_type=norm_type))
    totals = drive(runs)
    assert all(torch.equal(total, totals[0]) for total in totals)
    torch.testing.assert_close(totals[0], expected, rtol=1e-6, atol=0)


SHAPES = {"w0": (10, 1), "w1": (10, 2), "tied": (7,), "frozen": (99,), "unused": (3,)}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_a_single_process_to_the_bit(norm_type, zero, dtype):
    plan, module_map = make_plan([2, 3], zero=zero, num_microbatches=5), make_map(2, tied=(0, 1))
    gradients = {
        name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items() if name not in ("frozen", "unused")
    }
    order = ["tied", "w1", "w0", "unused"]
    expected = torch.nn.utils.get_total_norm([gradients[n] for n in order if n in gradients], norm_type)
    world = InMemoryWorld(plan.world_size)
    runs = []
    for rank, transport in enumerate(world.transports):
        mesh = make_mesh(plan, rank, module_map)
        parameters = {n: nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, shape in SHAPES.items()}
        speakers = speakers_of(plan, mesh.parameters, module_map)
        for item in mesh.owned:
            if item.name in gradients:
                parameters[item.name].grad = gradients[item.name].clone()
        runs.append(global_grad_norm(mesh, parameters, speakers, transport, names=order, norm_type=norm_type))
    for total in drive(runs):
        assert total.dtype is expected.dtype
        assert torch.equal(total, expected)


def test_norm_without_any_gradient_is_zero():
    mesh = make_mesh(make_plan([1]), 0, make_map(1))
    parameters = {n: nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
    speakers = speakers_of(mesh.plan, mesh.parameters, make_map(1))
    (total,) = drive([global_grad_norm(mesh, parameters, speakers, InMemoryWorld(1).transports[0])])
    assert total.item() == 0.0


def test_clipping():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, 4.0, 0.0])
    clip_by_norm(parameters, 2.5, torch.tensor(5.0))
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5, 2.0, 0.0]), rtol=1e-6, atol=0)
    clip_by_value(parameters, 1.75)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5, 1.75, 0.0]), rtol=1e-6, atol=0)
    assert parameters[1].grad is None
