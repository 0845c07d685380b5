from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_mist.model import derive_contexts, derive_splits, map_module
from lightning_mist.plan import Exclusion, Plan, StageMesh, StagePlan, plan_of
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.strategy.planning.division_proofs import degrees_of, other_masks, with_splits
from lightning_mist.strategy.ranks import Progress
from lightning_mist.tensors import slice_rows
from tests import zoo


def stage(devices, degree, layers):
    mesh = StageMesh(devices=devices, data_parallel_degree=len(devices) // degree, tensor_parallel_degree=degree)
    return StagePlan(layers=layers, mesh=mesh, microbatch_size=4 // mesh.data_parallel_degree)


def test_the_degrees_of_a_plan():
    stages = (stage((0, 1), 2, (0, 1)), stage((2, 3), 1, (1, 2)), stage((4, 5), 2, (2, 3)))
    assert degrees_of(Plan(global_batch_size=8, num_microbatches=2, stages=stages)) == ((2,), ())


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def found_and_call():
    module, make_batch = zoo.make("nano")
    batch, call = make_batch(4), zoo.step(module)
    return module, call, batch, map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3))


@pytest.mark.usefixtures("one_process")
def test_every_rank_gets_what_rank_zero_found(capsys):
    module, call, batch, found = found_and_call()
    made = with_splits(module, call, batch, found, ((2, 3), ()), Progress(enabled=True), lambda work: work())
    assert made == derive_splits(module, call, batch, found, (2, 3))
    assert made.cuts[0][0].sequence_dim == 1
    assert [degree for degree, _ in made.unsplit] == [3]
    assert "finding out how 2, 3 devices could share layers" in capsys.readouterr().err


def test_nothing_is_asked_of_others_where_nothing_is_to_be_found():
    module, call, batch, found = found_and_call()
    progress = Progress(enabled=False)
    assert with_splits(module, call, batch, found, ((), ()), progress, lambda work: work()) is found
    ruled_out = replace(found, exclusions=(Exclusion(feature="tensor", reason="so"),))
    assert with_splits(module, call, batch, ruled_out, ((2,), ()), progress, lambda work: work()) is ruled_out


@pytest.mark.usefixtures("one_process")
def test_ways_to_share_rows_are_what_rank_zero_found(capsys):
    module, call, batch, found = found_and_call()
    made = with_splits(module, call, batch, found, ((), (2, 5)), Progress(enabled=True), lambda work: work())
    assert made == derive_contexts(module, call, batch, found, (2, 5))
    assert ([split.degree for split in made.contexts], made.splits) == ([2], ())
    assert "finding out how 2, 5 devices could share rows" in capsys.readouterr().err


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_ranks_that_share_layers_or_rows_say_that_dropout_draws_other_masks(share):
    _, make_batch = zoo.make("gpt2")
    module = zoo.gpt2(dropout=share)
    batch, call = make_batch(4), zoo.step(module)
    found = map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3))
    made = with_splits(module, call, batch, found, ((2,), (2,)), Progress(enabled=False), lambda work: work())
    assert made.drops == (share > 0)
    for degrees, told in (({"tensor_parallel_degree": 2}, True), ({"context_parallel_degree": 2}, True), ({}, False)):
        plan = plan_of(len(found.blocks), world_size=2, global_batch_size=8, num_microbatches=2, **degrees)
        assert (other_masks(plan, made, None) is not None) == (told and share > 0)


def test_parts_of_a_batch_say_that_dropout_draws_other_masks():
    _, _, _, found = found_and_call()
    cut, whole = (plan_of(4, world_size=2, global_batch_size=8, num_microbatches=parts) for parts in (2, 1))
    for plan, drops in ((cut, True), (cut, False), (whole, True)):
        assert (other_masks(plan, found, CutRules(has_dropout=drops)) is not None) == (plan is cut and drops)
