import torch

from lightning_mist.strategy.training.starting import make_engine
from tests.memory_transport import InMemoryWorld
from tests.strategy.training.test_engine import ROWS, Net, make_plan, map_of


def test_the_engine_has_the_rank_of_its_transport_and_the_plans_schedule():
    module, plan = Net(), make_plan([2], parts=2, rows=ROWS)
    found = map_of(module, torch.randn(ROWS, 3))
    (transport,) = InMemoryWorld(1).transports
    engine = make_engine(module, plan, found, transport, device=torch.device("cpu"))
    assert (engine.rank, engine.plan, engine.is_last_stage) == (0, plan, True)
