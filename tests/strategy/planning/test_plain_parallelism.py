"""When plain data parallelism is enough."""

import math
import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lightning_mist.cost.time.region_times import collective_seconds
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.model import LayerSeconds
from lightning_mist.model.child_process import BUDGET
from lightning_mist.plan import LiveTensor, ModuleMap, Predicted, PredictedStage
from lightning_mist.strategy.planning.plain_parallelism import (
    at_once_reason,
    enough,
    most_to_save,
    optimizer_reason,
    plain_plan,
    sharing_seconds,
    steps_to_come,
)


def trainer(*, epochs=0, loaded=None, callbacks=(), **options):
    defaults = {"fast_dev_run": False, "barebones": False, "overfit_batches": 0.0, "limit_train_batches": 1.0}
    progress = SimpleNamespace(current=SimpleNamespace(processed=epochs))
    return SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_progress=progress),
        callbacks=list(callbacks),
        lightning_module=torch.nn.Identity(),
        _checkpoint_connector=SimpleNamespace(_loaded_checkpoint=loaded),
        **(defaults | options),
    )


class LearningRateFinder:
    """Called like Lightning's."""


class Own(LearningRateFinder):
    """Derived from it."""


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (trainer(), None),
        (trainer(fast_dev_run=3), "fast_dev_run=3"),
        (trainer(barebones=True), "barebones=True"),
        (trainer(overfit_batches=0.5), "overfit_batches=0.5"),
        (trainer(limit_train_batches=0), "limit_train_batches=0"),
        (trainer(callbacks=[Own()]), "callback Own trains before the fit does"),
        (trainer(epochs=1), "goes on from an earlier one"),
        (trainer(epochs=1, loaded={"loops": {}}), None),
    ],
)
def test_runs_that_are_plain_without_a_look(run, reason):
    found = at_once_reason(run)
    assert found is None if reason is None else reason in found


def parameters(numel):
    return [torch.nn.Parameter(torch.zeros(numel, device="meta"))]


def test_what_could_be_saved_grows_with_parameters_and_vanishes_on_one_device(tmp_path):
    two, one = parse_cluster("1x2xL4"), parse_cluster("1x1xL4")
    small, large = (most_to_save(parameters(numel), two, tmp_path) for numel in (10**4, 10**9))
    # Of 4 GB at least the reduction over PCIe of 1e10 B/s order, and eight passes at 3e11 B/s.
    assert 0 < small < 2e-3 < 0.1 < large
    assert most_to_save(parameters(10**9), one, tmp_path) == 0.0
    assert most_to_save(parameters(10**9), two, tmp_path, update=1e-6) >= 4e9 * 1e-6 > large
    # Links may be slower than any catalog knows.
    assert most_to_save(parameters(10**6), two, tmp_path, reduction=1e-6) >= 4e6 * 1e-6
    frozen = [torch.nn.Parameter(torch.zeros(10**6, device="meta"), requires_grad=False)]
    assert most_to_save(frozen, two, tmp_path) == 0.0


@pytest.mark.parametrize(
    ("seconds", "steps", "reason"),
    [
        (1e-3, math.inf, "more than 1 ms of a step"),
        (1e-2, 24, "more than 240 ms of 24 steps"),
        (1e-2, 101, None),
        (1e-2, math.inf, None),
    ],
)
def test_what_nobody_would_notice_is_not_searched_for(seconds, steps, reason):
    found = enough(saved=seconds, steps=steps, fits=lambda: True)
    assert found is None if reason is None else found.endswith(f"{reason}, and it fits")
    assert enough(saved=seconds, steps=steps, fits=lambda: False) is None
    assert enough(steps=steps, fits=lambda: True) is None


def test_steps_that_cannot_be_counted_may_be_many():
    class Uncounted:
        @property
        def estimated_stepping_batches(self):
            raise ValueError("accumulation changes")

    assert steps_to_come(Uncounted()) == math.inf
    assert steps_to_come(SimpleNamespace(estimated_stepping_batches=12)) == 12


def measured(rows, forward, layers=()):
    return LayerSeconds(kind="block", rows=rows, forward=forward, backward=tuple(2 * x for x in forward), layers=layers)


@pytest.mark.parametrize(
    ("saved", "seconds", "share"),
    [
        (0.04, measured((8,), (0.1,), layers=(0, 1, 2)), "4.3%"),  # 0.04 of 0.94
        (0.05, measured((8,), (0.1,), layers=(0, 1, 2)), None),
        (0.005, measured((8,), (0.1,)), "1.6%"),  # head or tail: once
        # Parts of four rows take 3 * 2 * 0.049 for what the whole takes 0.3 for.
        (0.005, measured((4, 8), (0.049, 0.1)), "3.6%"),
        (0.005, measured((4, 8), (0.045, 0.1)), None),
        (0.005, measured((4, 8), (0.06, 0.1)), "1.6%"),
        (0.005, measured((8,), (0.0,)), None),
    ],
)
def test_what_is_too_small_a_share_of_a_step_is_not_searched_for(saved, seconds, share):
    found = enough(saved=saved, seconds=[seconds], fits=lambda: True)
    assert found is None if share is None else f"more than {share} of a step" in found
    assert enough(saved=saved, seconds=[seconds], fits=lambda: False) is None


def passing(*shapes, **properties):
    """A map of two blocks with tensors of these shapes between them."""
    live = [
        LiveTensor(key=i, shape=shape, **({"dtype": "float32", "requires_grad": True, "batch_dim": 0} | properties))
        for i, shape in enumerate(shapes)
    ]
    return ModuleMap(step="training_step", blocks=("0", "1"), cuts=(tuple(live),), parameters=())


def test_sharing_layers_costs_what_passes_or_what_is_computed_again():
    profile = catalog_profile(parse_cluster("1x4xL4"))
    slow, fast = (measured((8,), (seconds,), layers=(0, 1)) for seconds in (1.0, 1e-6))

    def least(found, seconds, degree=2):
        return sharing_seconds(profile, found, [seconds, measured((8,), (5.0,))], degree)

    def exchange(degree, numel):
        payload = 4.0 * degree * numel
        apart = sum(
            float(collective_seconds(profile, name, degree, 1, payload)) for name in ("reduce_scatter", "all_gather")
        )
        return min(float(collective_seconds(profile, "all_reduce", degree, 1, payload)), apart)

    # In both directions, in both blocks, as much as the smallest tensor of all ranks' rows.
    assert least(passing((8, 4096), (8, 1024)), slow) == pytest.approx(4 * exchange(2, 8 * 1024))
    assert least(passing((8, 4096)), slow, degree=4) == pytest.approx(4 * exchange(4, 8 * 4096))
    # Blocks that are quickly computed for three more ranks' rows.
    assert least(passing((8, 4096)), fast, degree=4) == pytest.approx(2 * 3 * 3e-6)
    for nothing in (passing(), passing((8, 64), batch_dim=None), passing((8, 64), requires_grad=False)):
        assert least(nothing, slow) == 4 * exchange(2, 0)


def predicted(seconds):
    stage = PredictedStage(
        steady_seconds=seconds, boundary_seconds=0.0, forward_seconds=seconds, backward_seconds=0.0, peak_bytes=1
    )
    return Predicted(step_seconds=seconds, stages=(stage,))


def test_a_gain_must_be_told_from_what_predictions_are_wrong_by():
    def found(seconds, *, fits=True):
        return enough(predicted=(predicted(seconds), predicted(1.0)), fits=lambda: fits)

    assert "would save 4.9% of a step" in found(0.951)
    assert "would save 0.0% of a step" in found(1.2)
    assert found(1.2, fits=False) is None
    assert found(0.949) is None


def test_plain_plans_are_plain():
    for rows in (None, 4):
        plan = plain_plan(3, rows, 2)
        assert plan.is_plain
        assert plan.global_batch_size == 3 * (rows or 1)


class Sharing(torch.optim.SGD):
    """Talks to other processes in its step."""

    def __init__(self, parameters, way):
        super().__init__(parameters, lr=1.0)
        self.way = way

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            try:
                self.way(parameter.detach())
            except Exception:  # and is not stopped by an error
                continue


WAYS = {
    "rank": lambda p: dist.get_rank(),
    "gather": lambda p: dist.all_gather([torch.empty_like(p)], p),
    "later": lambda p: dist.all_reduce(p, async_op=True).wait(),
    "object": lambda p: dist.broadcast_object_list([1]),
    "functional": lambda p: functional.all_reduce(p, "sum", dist.group.WORLD),
    "direct": lambda p: dist.group.WORLD.allreduce([p]).wait(),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_talks_to_other_processes_is_named(way):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = Sharing([torch.nn.Parameter(torch.ones(8, 4)) for _ in range(2)], WAYS[way])
        reason = optimizer_reason([optimizer], torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert reason is not None
    assert re.match(rf"Sharing shares its step with other processes: it (calls|asks) .*{__file__}:\d+", reason)


def test_an_optimizer_that_waits_in_vain_is_named(monkeypatch):
    monkeypatch.setattr(BUDGET, "idle_seconds", 0.5)
    held = threading.Lock()
    held.acquire()
    optimizer = Sharing([torch.nn.Parameter(torch.ones(8, 4))], lambda p: held.acquire())
    reason = optimizer_reason([optimizer], torch.device("cpu"))
    assert f"a trial before training waits at {__file__}:" in reason
    assert "tensor(" not in reason
