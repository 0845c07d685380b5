import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.gradients.reducer import UnitGradients
from lightning_mist.schedule.stage_units import ShardUnit
from tests.integration.parity import make_plan
from tests.memory_transport import InMemoryWorld, drive
from tests.plan.test_mesh import make_map

SHAPES = {"w0": (10, 1), "w1": (10, 2), "tied": (7,), "frozen": (99,), "unused": (3,)}
UNITS = {
    (0, 0): ShardUnit(unit=0, names=("w0", "tied", "frozen"), reduced=("w0", "tied")),
    (0, 1): ShardUnit(unit=1, names=("w1", "tied", "unused"), reduced=("w1", "unused")),
}
RANKS = 3


class World:
    """The ranks of one stage, each with its own parameters."""

    def __init__(self):
        plan = make_plan([2], degrees=[RANKS], zero=2)
        world = InMemoryWorld(RANKS)
        self.meshes = [make_mesh(plan, rank, make_map(2)) for rank in range(RANKS)]
        self.parameters = [
            {
                item.name: nn.Parameter(torch.zeros(SHAPES[item.name]), requires_grad=item.requires_grad)
                for item in mesh.held
            }
            for mesh in self.meshes
        ]
        self.gradients = [
            UnitGradients(mesh, parameters, UNITS, transport)
            for mesh, parameters, transport in zip(self.meshes, self.parameters, world.transports, strict=True)
        ]
        self.expected = {}
        self._random = torch.Generator().manual_seed(1)

    def backward(self, unit, *, missing=()):
        """Every rank gets gradients of a unit's parameters and reduces them."""
        for rank, parameters in enumerate(self.parameters):
            for name in UNITS[0, unit].reduced:
                if (rank, name) not in missing:
                    gradient = torch.randn(SHAPES[name], generator=self._random)
                    parameters[name].grad = gradient
                    self.expected[name] = self.expected.get(name, 0) + gradient / RANKS
        drive([self._reduce(rank, unit) for rank in range(RANKS)])

    def _reduce(self, rank, unit):
        self.gradients[rank].reduce((0, unit))
        return
        yield

    def finish(self):
        drive([gradients.finish() for gradients in self.gradients])

    def check(self):
        for mesh, parameters in zip(self.meshes, self.parameters, strict=True):
            owned = {item.name for item in mesh.owned}
            for name, parameter in parameters.items():
                if name in owned and name in self.expected:
                    torch.testing.assert_close(parameter.grad, self.expected[name])
                else:
                    assert parameter.grad is None, (mesh.rank, name)


def everywhere(name):
    return {(rank, name) for rank in range(RANKS)}


def test_owners_end_with_the_sum_over_microbatches_and_the_mean_over_ranks():
    world = World()
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
    world = World()
    world.backward(1)
    assert all(p.grad is None for parameters in world.parameters for p in parameters.values())


@pytest.mark.parametrize("lacking", [{(0, "w1")}, {(1, "w1"), (2, "w1")}, {(0, "unused"), (1, "unused")}])
def test_a_gradient_of_any_rank_in_any_microbatch_counts(lacking):
    world = World()
    world.backward(1, missing=lacking)
    world.backward(0)
    world.backward(1, missing=everywhere("w1") | everywhere("unused"))
    world.backward(0)
    world.finish()
    world.check()


def test_a_gradient_after_the_last_reduction_is_an_error():
    world = World()
    world.backward(0)
    world.parameters[0]["w0"].grad = torch.ones(SHAPES["w0"])
    with pytest.raises(ScheduleError, match="w0 got a gradient after the last reduction of its unit"):
        world.finish()


def test_sparse_gradients_are_refused():
    world = World()
    for parameters in world.parameters:
        parameters["w0"].grad = torch.ones(SHAPES["w0"]).to_sparse()
    with pytest.raises(PlanError, match=r"gradient of w0 is torch\.sparse_coo.*over the 3 data-parallel ranks"):
        world.backward(0, missing=everywhere("w0"))


def test_what_was_forgotten_does_not_come_back():
    world = World()
    world.backward(0)
    for gradients in world.gradients:
        gradients.forget()
    world.finish()
    world.expected.clear()
    world.check()
