from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_mist.errors import InfeasibleError, PlanError
from lightning_mist.plan import ModuleMap
from lightning_mist.strategy.together import on_rank_zero, same_everywhere

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


def _see(other):
    found = replace(MAP, blocks=("a", "c")) if dist.get_rank() == 1 and other else MAP
    try:
        same_everywhere(found)
    except PlanError as error:
        return str(error)
    return ""


def test_ranks_that_see_another_module_are_named(gloo_workers):
    assert gloo_workers.run(2, _see, False) == ["", ""]
    first, second = gloo_workers.run(2, _see, True)
    assert first == second
    assert "ranks [1] see another module than rank 0" in first
