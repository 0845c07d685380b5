"""How often a batch waits for its device: as often whatever the microbatches, and whatever is logged and returned.

The engine runs on a CPU whose results come home as those of a device do. Everything that would make a device wait, a
number asked of a tensor or a copy, is counted, by whom it may be asked.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.devices import Homeward
from lightning_mist.errors import TraceError
from lightning_mist.plan.grid import plan_of
from lightning_mist.strategy.planning.division_proofs import prove_here
from lightning_mist.strategy.training.engine import Engine
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.integration.parity import map_of
from tests.memory_transport import InMemoryWorld
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("ended_streams")

CPU = torch.device("cpu")
ROWS = 8


class Net(nn.Module):
    """Divides its loss by a count over the batch; logs and returns as much as it is told to."""

    def __init__(self, logs, extras):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.logs, self.extras = logs, extras

    def log(self, name, value, **arguments):
        assert isinstance(value, Tensor)

    def log_dict(self, dictionary, **arguments):
        raise AssertionError

    def training_step(self, batch, batch_idx):
        h = batch["x"]
        for block in self.blocks:
            h = block(h)
        loss = (h.square().sum(1) * batch["w"]).sum() / batch["w"].sum()
        for number in range(self.logs):
            self.log(f"value {number}", loss * number)
        return {"loss": loss, **{f"rows {number}": h * number for number in range(self.extras)}}


class Waits(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self):
        super().__init__()
        self.count, self.is_home = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._note(func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default))
        return func(*args, **(kwargs or {}))

    def _note(self, waits):
        self.count += waits and not self.is_home

    @contextmanager
    def counting(self):
        """Numbers that torch reads without an operator are counted too."""

        def counted(original):
            def call(tensor, *args, **kwargs):
                self._note(True)
                return original(tensor, *args, **kwargs)

            return call

        with mock.patch.multiple(Tensor, tolist=counted(Tensor.tolist), cpu=counted(Tensor.cpu)), self:
            yield


def make_engine(parts, *, logs=1, extras=1, rules=True):
    torch.manual_seed(0)
    module, batch = Net(logs, extras), {"x": torch.randn(ROWS, 3), "w": torch.ones(ROWS)}
    plan = plan_of(2, world_size=1, global_batch_size=ROWS, microbatch_size=ROWS // parts)
    found = map_of(module, batch)
    proved = prove_here(module, found.blocks, lambda item: module.training_step(item, 0), batch) if rules else None
    assert not isinstance(proved, str), proved
    (transport,) = InMemoryWorld(1).transports
    ops = LateHost(seed=1)
    engine = Engine(module, plan, found, transport, device=CPU, rules=proved)
    engine._homeward = Homeward(ops)
    return engine, batch, ops


def train(engine, batch):
    """One batch and its backward, and what would have waited in it."""
    for parameter in engine.module.parameters():
        parameter.grad = None
    waits, check = Waits(), engine._part_steps.check

    def check_at_home(copies):
        assert all(id(tensor) in copies for tensor in engine._part_steps.tensors())
        waits.is_home = True
        check(copies)

    with waits.counting(), mock.patch.object(engine._part_steps, "check", check_at_home):
        _, loss = engine.train_batch(batch, lambda part: engine.module.training_step(part, 0))
        waits.is_home = False
        loss.backward()
    return waits.count


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize(("logs", "extras"), [(0, 0), (3, 2)])
@pytest.mark.parametrize("parts", tiered([1, 2, 8], [1, 8]))
def test_a_batch_waits_once_for_all_that_it_brings_home(parts, logs, extras, rules):
    engine, batch, ops = make_engine(parts, logs=logs, extras=extras, rules=rules and parts > 1)
    train(engine, batch)
    before = ops.synchronizations
    found = train(engine, batch)
    assert ops.synchronizations == before + 1
    # Whether the factor that reaches the loss is 1 is asked where it is in host memory only.
    assert found == 1


def test_results_are_the_same_as_brought_one_by_one():
    first, batch, _ = make_engine(4, logs=2, extras=2)
    second, *_ = make_engine(4, logs=2, extras=2)
    second._homeward = None
    results = [
        engine.train_batch(batch, lambda part, e=engine: e.module.training_step(part, 0)) for engine in (first, second)
    ]
    (mine, loss), (wanted, expected) = results
    assert torch.equal(loss, expected)
    assert mine.extras.keys() == wanted.extras.keys()
    assert all(torch.equal(mine.extras[name], wanted.extras[name]) for name in mine.extras)
    for record, other in zip(mine.records, wanted.records, strict=True):
        assert (record.name, record.arguments) == (other.name, other.arguments)
        assert torch.equal(record.value, other.value)


def test_what_was_not_proved_is_seen_when_all_parts_have_run():
    """A count of the first part alone, of which no later part knows, ends training too."""
    engine, batch, _ = make_engine(4)
    train(engine, batch)
    parts = []

    def step(part):
        parts.append(part)
        changed = {**part, "w": part["w"] * 2} if len(parts) == 1 else part
        return engine.module.training_step(changed, 0)

    with pytest.raises(TraceError, match="do not count what the batch was proved to count"):
        engine.train_batch(batch, step)
    assert len(parts) == 4


def test_results_are_complete_when_they_are_said_to_be():
    """Values that tensor-parallel ranks hold in parts are put together behind the user's step."""
    engine, batch, _ = make_engine(4)
    seen = []
    engine.executor.results_made = lambda: seen.append(sum(item is not None for item in engine.executor.outputs))
    train(engine, batch)
    assert seen == [1, 2, 3, 4]
