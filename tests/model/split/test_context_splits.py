from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.model import map_module
from lightning_mist.model.split.context_splits import derive_contexts
from lightning_mist.plan import Exclusion
from lightning_mist.tensors import slice_rows
from tests import zoo
from tests.traps.context import Decoder, NextToken, Summed, of
from tests.traps.project import loader


def derived(module, call, batch, degrees):
    found = map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3))
    return derive_contexts(module, call, batch, found, degrees)


def of_zoo(name, degrees=(2, 4)):
    module, make_batch = zoo.make(name)
    return derived(module, zoo.step(module), make_batch(4), degrees)


def of_trap(kind, degrees):
    module = kind()
    return derived(module, module.loss, next(iter(loader())), degrees)


def test_a_decoder_shares_rows_and_no_parameters():
    found = of_zoo("nano")
    assert [(split.degree, split.parameters) for split in found.contexts] == [(2, ()), (4, ())]
    assert found.context(2).sequence == found.context(4).sequence
    assert [(entry.position, entry.dim) for entry in found.context(2).sequence] == [(index, 1) for index in range(4)]
    assert [[live.sequence_dim for live in cut] for cut in found.cuts] == [[1], [1], [1]]
    assert found.context(2).notes == ()


def test_a_length_that_a_degree_does_not_divide_is_named_with_it():
    found = of_trap(Decoder, (2, 4))
    assert [split.degree for split in found.contexts] == [2]
    with pytest.raises(
        PlanError, match=r"context_parallel_degree = 4: .* 6 positions, which 4 does not divide; use .*2"
    ):
        found.context(4)


def test_tokens_that_meet_outside_of_attention_rule_it_out():
    found = of_trap(of(Summed), (2,))
    with pytest.raises(PlanError, match=r"context_parallel_degree = 2: Summed: .* meet in cumsum: .*; use .* = 1"):
        found.context(2)


def test_a_tail_that_puts_tokens_together_is_told():
    (note,) = of_trap(NextToken, (2,)).context(2).notes
    assert "__getitem__" in note


def test_what_keeps_ranks_from_running_a_step_for_others_rules_it_out():
    module, make_batch = zoo.make("nano")
    batch, call = make_batch(4), zoo.step(module)
    found = map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3))
    of_tensors = replace(found, exclusions=(Exclusion(feature="tensor", reason="whole parameters"),))
    assert derive_contexts(module, call, batch, of_tensors, (2,)).contexts
    reasons = tuple(Exclusion(feature=feature, reason="what it keeps") for feature in ("pipeline", "tensor"))
    shared = replace(found, exclusions=reasons)
    assert derive_contexts(module, call, batch, shared, (2,)).excludes("context") == ("what it keeps",)
    assert derive_contexts(module, call, batch, found, (1,)) is found
