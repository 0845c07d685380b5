import random
from contextlib import contextmanager

import pytest
import torch

from lightning_mist.attributes import SharedPatch
from lightning_mist.runtime.process_state import get_random_state, seed_random, set_random_state


def test_the_first_makes_the_change_and_the_last_undoes_it_in_any_order():
    log = []

    @contextmanager
    def change():
        log.append("made")
        yield
        log.append("undone")

    patch = SharedPatch(change)
    first, second = patch, patch
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert log == ["made"]
    second.__exit__(None, None, None)
    assert log == ["made", "undone"]
    with patch, patch:
        pass
    assert log == ["made", "undone"] * 2


CPU = torch.device("cpu")


def draw(device=CPU):
    return torch.rand(4, device=device).tolist()


def test_numbers_go_on_from_a_state_that_travelled():
    seed_random(CPU, 1)
    state = get_random_state(CPU)
    assert (state.dtype, state.device) == (torch.uint8, CPU)
    wanted = draw()
    assert draw() != wanted
    set_random_state(state.clone(), CPU)
    assert draw() == wanted


@pytest.mark.gpu
def test_the_state_of_a_device_travels_too():
    device = torch.device("cuda", 0)
    seed_random(device, 1)
    state = get_random_state(device)
    assert state.device == CPU
    wanted = draw(), draw(device)
    set_random_state(state, device)
    assert (draw(), draw(device)) == wanted
    seed_random(device, 1)
    assert (draw(), draw(device)) == wanted


def test_equal_keys_give_equal_numbers_and_others_do_not():
    drawn = []
    for key in [(1, 2), (1, 2), (2, 1), (1, 2, 0), (12,)]:
        seed_random(CPU, *key)
        drawn.append(tuple(draw()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


def test_a_key_means_the_same_seed_in_any_process():
    # Written down: Python's own hash would differ from process to process, and ranks would drop out other units.
    seed_random(CPU, 3, 1, 4)
    assert torch.initial_seed() == 36159368616179749


def test_generators_that_a_step_does_not_draw_from_are_left_alone():
    before = random.getstate()
    seed_random(CPU, 5)
    assert random.getstate() == before
