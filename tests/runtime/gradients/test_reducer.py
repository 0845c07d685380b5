import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.gradients.reducer import GradientReducer
from lightning_mist.runtime.parameters.tensor_parts import parts_of
from tests.memory_transport import InMemoryWorld, drive
from tests.plan.test_mesh import make_map, make_plan

SHAPES = {"w0": (10, 1), "w1": (10, 2), "tied": (7,), "frozen": (99,), "unused": (3,)}


class World:
    """All ranks of a plan, each with its own parameters and gradients."""

    def __init__(self, plan, module_map):
        self.plan = plan
        world = InMemoryWorld(plan.world_size)
        self.meshes = [make_mesh(plan, rank, module_map) for rank in range(plan.world_size)]
        self.parameters = [
            {
                item.name: nn.Parameter(torch.zeros(SHAPES[item.name]), requires_grad=item.requires_grad)
                for item in mesh.held
            }
            for mesh in self.meshes
        ]
        self.reducers = [
            GradientReducer(mesh, parameters, transport)
            for mesh, parameters, transport in zip(self.meshes, self.parameters, world.transports, strict=True)
        ]

    def fill(self, missing=()):
        generator = torch.Generator().manual_seed(1)
        expected = {}
        for rank, parameters in enumerate(self.parameters):
            for name, parameter in parameters.items():
                if not parameter.requires_grad or (rank, name) in missing:
                    continue
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                expected[name] = expected.get(name, 0) + parameter.grad / self.plan.world_size
        return expected

    def run(self, *names):
        for name in names:
            drive([getattr(reducer, name)() for reducer in self.reducers])

    def check(self, expected):
        for mesh, parameters in zip(self.meshes, self.parameters, strict=True):
            owned = {item.name for item in mesh.owned}
            for name, parameter in parameters.items():
                if name in owned and name in expected:
                    torch.testing.assert_close(parameter.grad, expected[name])
                else:
                    assert parameter.grad is None, (mesh.rank, name)


@pytest.mark.parametrize("degrees", [[1, 1], [2, 2], [2, 1], [1, 3]])
@pytest.mark.parametrize("zero", [0, 1, (0, 1)])
@pytest.mark.parametrize("tied", [(0,), (0, 1)])
def test_gradients_become_the_mean_everywhere(degrees, zero, tied):
    world = World(make_plan(degrees, zero=zero), make_map(2, tied=tied))
    expected = world.fill()
    world.run("reduce", "reduce_tied")
    world.check(expected)


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
    world = TensorWorld(plan, module_map)
    expected = world.fill()
    world.run("reduce", "reduce_tied")
    world.check(expected)


class TensorWorld:
    """All ranks of a plan with tensor parallelism: tensor-parallel peers have (parts of) one gradient."""

    def __init__(self, plan, module_map):
        self.plan, world = plan, InMemoryWorld(plan.world_size)
        shapes = {use.name: use.shape for use in module_map.parameters}
        self.meshes = [make_mesh(plan, rank, module_map) for rank in range(plan.world_size)]
        self.parts = [parts_of(plan, rank, module_map) for rank in range(plan.world_size)]
        self.parameters = [
            {
                item.name: nn.Parameter(self.take(mesh.rank, item.name, torch.zeros(shapes[item.name])))
                for item in mesh.held
                if item.requires_grad
            }
            for mesh in self.meshes
        ]
        self.reducers = [
            GradientReducer(mesh, parameters, transport, parts=parts)
            for mesh, parameters, transport, parts in zip(
                self.meshes, self.parameters, world.transports, self.parts, strict=True
            )
        ]
        self.shapes = shapes

    def take(self, rank, name, whole):
        return self.parts[rank][name].take(whole) if name in self.parts[rank] else whole.clone()

    def fill(self):
        expected = {}
        for rank, mesh in enumerate(self.meshes):
            for name, parameter in self.parameters[rank].items():
                generator = torch.Generator().manual_seed(100 * mesh.tensor_peers[0] + len(name))
                gradient = torch.randn(self.shapes[name], generator=generator)
                parameter.grad = self.take(rank, name, gradient)
                if mesh.tensor_index == 0:
                    expected[name] = expected.get(name, 0) + gradient / self.plan.world_size
        return expected

    def run(self, *names):
        for name in names:
            drive([getattr(reducer, name)() for reducer in self.reducers])

    def check(self, expected):
        for mesh, parameters in zip(self.meshes, self.parameters, strict=True):
            owned = {item.name for item in mesh.owned}
            for name, parameter in parameters.items():
                if name in owned:
                    torch.testing.assert_close(parameter.grad, self.take(mesh.rank, name, expected[name]))
                else:
                    assert parameter.grad is None, (mesh.rank, name)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(zero):
    world = World(make_plan([2, 2], zero=zero), make_map(2, tied=(0, 1)))
    expected = world.fill(missing={(0, "w0"), (3, "w1"), (0, "tied"), (1, "tied"), (2, "unused"), (3, "unused")})
    assert "unused" not in expected
    world.run("reduce", "reduce_tied")
    world.check(expected)


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
    world.check({name: torch.full(SHAPES[name], 1.5) for name in ("w0", "tied", "unused")})


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
    world.check({name: torch.full(SHAPES[name], 1.0) for name in ("w0", "tied")})


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
