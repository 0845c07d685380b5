import itertools

import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.gradients.reducer import GradientReducer, UnitGradients
from lightning_mist.runtime.parameters.parameter_parts import parts_of
from lightning_mist.schedule.stage_units import ShardUnit
from tests.integration.parity import make_plan as plan_of_layers
from tests.memory_transport import InMemoryWorld, drive
from tests.plan.test_mesh import make_map, make_plan

SHAPES = {"w0": (10, 1), "w1": (10, 2), "tied": (7,), "frozen": (99,), "unused": (3,)}


class Ranks:
    """All ranks of a plan, each with its own parameters; tensor-parallel peers have (parts of) one gradient."""

    def __init__(self, plan, module_map):
        self.plan, self.transports = plan, InMemoryWorld(plan.world_size).transports
        self.shapes = {use.name: use.shape for use in module_map.parameters}
        self.meshes = [make_mesh(plan, rank, module_map) for rank in range(plan.world_size)]
        self.parts = [parts_of(plan, rank, module_map) for rank in range(plan.world_size)]
        self.parameters = [
            {item.name: self._parameter(mesh.rank, item.name, item.requires_grad) for item in mesh.held}
            for mesh in self.meshes
        ]
        self.expected = {}
        self._random = torch.Generator()

    def _parameter(self, rank, name, requires_grad):
        whole = torch.zeros(self.shapes[name])
        return nn.Parameter(self.take(rank, name, whole), requires_grad=requires_grad)

    def take(self, rank, name, whole):
        return self.parts[rank][name].take(whole) if name in self.parts[rank] else whole.clone()

    def give(self, rank, name, batch=0):
        """A rank gets a gradient of a parameter; the mean of all ranks' counts equal ones of tensor peers once."""
        mesh = self.meshes[rank]
        seed = self._random.manual_seed(1000 * mesh.tensor_peers[0] + 100 * batch + sum(map(ord, name)))
        gradient = torch.randn(self.shapes[name], generator=seed)
        self.parameters[rank][name].grad = self.take(rank, name, gradient)
        if mesh.tensor_index == 0:
            self.expected[name] = self.expected.get(name, 0) + gradient / self.plan.world_size

    def check(self):
        """Owners have the mean, of what anybody got a gradient of."""
        for mesh, parameters in zip(self.meshes, self.parameters, strict=True):
            owned = {item.name for item in mesh.owned}
            for name, parameter in parameters.items():
                if name in owned and name in self.expected:
                    torch.testing.assert_close(parameter.grad, self.take(mesh.rank, name, self.expected[name]))
                else:
                    assert parameter.grad is None, (mesh.rank, name)


class World(Ranks):
    """Ranks that reduce everything together."""

    def __init__(self, plan, module_map):
        super().__init__(plan, module_map)
        self.reducers = [
            GradientReducer(mesh, parameters, transport, parts=parts)
            for mesh, parameters, transport, parts in zip(
                self.meshes, self.parameters, self.transports, self.parts, strict=True
            )
        ]

    def fill(self, missing=()):
        for rank, parameters in enumerate(self.parameters):
            for name, parameter in parameters.items():
                if parameter.requires_grad and (rank, name) not in missing:
                    self.give(rank, name)

    def run(self, *names):
        for name in names:
            drive([getattr(reducer, name)() for reducer in self.reducers])


@pytest.mark.parametrize("degrees", [[1, 1], [2, 2], [2, 1], [1, 3]])
@pytest.mark.parametrize("zero", [0, 1, (0, 1)])
@pytest.mark.parametrize("tied", [(0,), (0, 1)])
def test_gradients_become_the_mean_everywhere(degrees, zero, tied):
    world = World(make_plan(degrees, zero=zero), make_map(2, tied=tied))
    world.fill()
    world.run("reduce", "reduce_tied")
    world.check()


@pytest.mark.parametrize("tied_size", [7, 8])
@pytest.mark.parametrize("zero", [0, 1, (0, 1)])
@pytest.mark.parametrize(
    ("degrees", "tensor"),
    [([2], 2), ([1, 1], 2), ([2, 1], 2), ([1, 1], [2, 1]), ([1, 2], [2, 1]), ([2, 2], [1, 2]), ([2, 1], [2, 1])],
)
def test_gradients_of_parts_become_parts_of_the_mean(degrees, tensor, zero, tied_size):
    """Also where a tied parameter is whole in one stage and in parts in another; equal copies count once."""
    tied = (0, 1) if len(degrees) > 1 else (0,)
    plan = make_plan(degrees, tensor=tensor, zero=zero if len(degrees) > 1 or zero != (0, 1) else 1)
    module_map = make_map(len(degrees), tied=tied, tied_size=tied_size, degrees=(2,))
    world = World(plan, module_map)
    world.fill()
    world.run("reduce", "reduce_tied")
    world.check()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(zero):
    world = World(make_plan([2, 2], zero=zero), make_map(2, tied=(0, 1)))
    world.fill(missing={(0, "w0"), (3, "w1"), (0, "tied"), (1, "tied"), (2, "unused"), (3, "unused")})
    assert "unused" not in world.expected
    world.run("reduce", "reduce_tied")
    world.check()


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets_leave_during_the_last_backward(zero):
    world = World(make_plan([2], zero=zero), make_map(1))
    for reducer, parameters in zip(world.reducers, world.parameters, strict=True):
        reducer.expect(parameters)
    losses = [
        sum((p * (rank + 1)).sum() for p in parameters.values() if p.requires_grad)
        for rank, parameters in enumerate(world.parameters)
    ]
    for loss in losses:
        loss.backward()
    # Everything has left before the reduction is asked for.
    assert all(p.grad is None for parameters in world.parameters for p in parameters.values())
    world.run("reduce")
    world.expected = {name: torch.full(SHAPES[name], 1.5) for name in ("w0", "tied", "unused")}
    world.check()


def test_only_expected_gradients_leave_and_completed_ones_without_a_gradient_hold_up_none():
    world = World(make_plan([2]), make_map(1))
    for reducer, parameters in zip(world.reducers, world.parameters, strict=True):
        reducer.expect(["w0"])
        sum(parameters[name].sum() for name in ("w0", "tied")).backward()
        assert parameters["w0"].grad is not None
        reducer.complete(["w0", "tied"])
        assert parameters["w0"].grad is not None
        reducer.complete(["unused"])
        assert all(parameter.grad is None for parameter in parameters.values())
    world.run("reduce")
    world.expected = {name: torch.full(SHAPES[name], 1.0) for name in ("w0", "tied")}
    world.check()


def test_nothing_stays_behind_after_a_batch_that_broke_off():
    world = World(make_plan([2]), make_map(1))
    reducer = world.reducers[0]
    reducer.expect(world.parameters[0])
    sum(p.sum() for p in world.parameters[0].values() if p.requires_grad).backward()
    reducer.disarm()
    sum(p.sum() for p in world.parameters[0].values() if p.requires_grad).backward()
    assert all(p.grad is not None for p in world.parameters[0].values() if p.requires_grad)


@pytest.mark.parametrize("degrees", [[1], [2]])
def test_a_parameter_that_was_not_trained_is_refused(degrees):
    world = World(make_plan(degrees), make_map(1))
    world.parameters[0]["frozen"].grad = torch.zeros(99)
    with pytest.raises(PlanError, match=r"frozen has a gradient.*plan again after unfreezing"):
        drive([world.reducers[0].reduce()])


def test_sparse_gradients_are_refused():
    world = World(make_plan([2]), make_map(1))
    world.parameters[0]["w0"].grad = torch.zeros(10, 1).to_sparse()
    with pytest.raises(PlanError, match=r"gradient of w0 is torch\.sparse_coo.*sparse=False"):
        drive([world.reducers[0].reduce()])


def test_owners_hand_out_what_they_updated():
    world = World(make_plan([3], zero=1), make_map(1))
    for mesh, parameters in zip(world.meshes, world.parameters, strict=True):
        with torch.no_grad():
            for item in mesh.owned:
                parameters[item.name].fill_(mesh.rank + 1)
    world.run("gather_parameters")
    owner = {item.name: mesh.rank + 1 for mesh in world.meshes for item in mesh.owned if item.requires_grad}
    for parameters in world.parameters:
        assert {n: p.unique().tolist() for n, p in parameters.items() if n != "frozen"} == {
            n: [float(v)] for n, v in owner.items()
        }


# Reduced unit by unit.

UNITS = {
    (0, 0): ShardUnit(unit=0, names=("w0", "tied", "frozen"), reduced=("w0", "tied")),
    (0, 1): ShardUnit(unit=1, names=("w1", "tied", "unused"), reduced=("w1", "unused")),
}
RANKS = 3


class UnitWorld(Ranks):
    """The ranks of one stage, which reduce unit by unit."""

    def __init__(self):
        super().__init__(plan_of_layers([2], degrees=[RANKS], zero=2), make_map(2))
        self.gradients = [
            UnitGradients(mesh, parameters, UNITS, transport)
            for mesh, parameters, transport in zip(self.meshes, self.parameters, self.transports, strict=True)
        ]
        self._batches = itertools.count()

    def backward(self, unit, *, missing=()):
        """Every rank gets gradients of a unit's parameters and reduces them."""
        batch = next(self._batches)
        for rank, name in itertools.product(range(RANKS), UNITS[0, unit].reduced):
            if (rank, name) not in missing:
                self.give(rank, name, batch)
        drive([self._reduce(rank, unit) for rank in range(RANKS)])

    def _reduce(self, rank, unit):
        self.gradients[rank].reduce((0, unit))
        return
        yield

    def finish(self):
        drive([gradients.finish() for gradients in self.gradients])


def everywhere(name):
    return {(rank, name) for rank in range(RANKS)}


def test_owners_end_with_the_sum_over_microbatches_and_the_mean_over_ranks():
    world = UnitWorld()
    for _ in range(3):
        world.backward(1, missing=everywhere("unused"))
        world.backward(0)
    world.finish()
    assert set(world.expected) == {"w0", "w1", "tied"}
    world.check()
    world.expected.clear()
    for parameters in world.parameters:
        for parameter in parameters.values():
            parameter.grad = None
    world.backward(1)
    world.finish()
    world.check()


def test_no_rank_keeps_a_gradient_on_its_way():
    world = UnitWorld()
    world.backward(1)
    assert all(p.grad is None for parameters in world.parameters for p in parameters.values())


@pytest.mark.parametrize("lacking", [{(0, "w1")}, {(1, "w1"), (2, "w1")}, {(0, "unused"), (1, "unused")}])
def test_a_gradient_of_any_rank_in_any_microbatch_counts(lacking):
    world = UnitWorld()
    world.backward(1, missing=lacking)
    world.backward(0)
    world.backward(1, missing=everywhere("w1") | everywhere("unused"))
    world.backward(0)
    world.finish()
    world.check()


def test_a_gradient_after_the_last_reduction_is_an_error():
    world = UnitWorld()
    world.backward(0)
    world.parameters[0]["w0"].grad = torch.ones(SHAPES["w0"])
    with pytest.raises(ScheduleError, match="w0 got a gradient after the last reduction of its unit"):
        world.finish()


def test_sparse_gradients_of_units_are_refused():
    world = UnitWorld()
    for parameters in world.parameters:
        parameters["w0"].grad = torch.ones(SHAPES["w0"]).to_sparse()
    with pytest.raises(PlanError, match=r"gradient of w0 is torch\.sparse_coo.*over the 3 data-parallel ranks"):
        world.backward(0, missing=everywhere("w0"))


def test_what_was_forgotten_does_not_come_back():
    world = UnitWorld()
    world.backward(0)
    for gradients in world.gradients:
        gradients.forget()
    world.finish()
    world.expected.clear()
    world.check()
