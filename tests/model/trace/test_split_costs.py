"""Costs of one tensor-parallel rank, with splits of a small GPT written by hand."""

import dataclasses
from functools import lru_cache

import pytest
import sympy
import torch

from lightning_mist.model import map_module, trace_model
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from lightning_mist.plan import ParameterSplit, SequenceSplit, TensorSplit
from tests import zoo
from tests.tiers import tiered

LAYERS, WIDTH, HEADS = 3, 32, 4
THIRDS, WIDE, NARROW = ((3, False), (WIDTH, True)), ((4 * WIDTH, True),), ((WIDTH, True),)


def split_of(degree, *, sequence=True, blocks=range(LAYERS)):
    """Attention by heads, the perceptron by its inner width."""
    found = []
    for name in (f"transformer.h.{index}" for index in blocks):
        found += [
            ParameterSplit(name=f"{name}.attn.c_attn.weight", dim=0, factors=THIRDS),
            ParameterSplit(name=f"{name}.attn.c_attn.bias", dim=0, factors=THIRDS),
            ParameterSplit(name=f"{name}.attn.c_proj.weight", dim=1, factors=NARROW),
            ParameterSplit(name=f"{name}.mlp.0.weight", dim=0, factors=WIDE),
            ParameterSplit(name=f"{name}.mlp.0.bias", dim=0, factors=WIDE),
            ParameterSplit(name=f"{name}.mlp.2.weight", dim=1, factors=WIDE),
        ]
    entries = tuple(SequenceSplit(position=index, leaf=0, dim=1) for index in range(LAYERS))
    return TensorSplit(degree=degree, parameters=tuple(found), sequence=entries if sequence else ())


@lru_cache(maxsize=4)
def traced(*splits):
    module = zoo.Nano(layers=LAYERS)
    batch, other = (tuple(torch.randint(0, zoo.VOCABULARY, (2, rows, 32))) for rows in (4, 3))
    found = map_module(module, zoo.step(module), batch, second_batch=other)
    cuts = tuple(tuple(dataclasses.replace(live, sequence_dim=1) for live in cut) for cut in found.cuts)
    return trace_model(
        module,
        batch,
        call=zoo.step(module),
        module_map=dataclasses.replace(found, splits=splits, cuts=cuts),
        optimizer=torch.optim.AdamW,
    )


SPLITS = (split_of(2), split_of(4))
TWO = SPLITS[:1]
ALONE = {2: TWO, 4: SPLITS[1:]}


def by_kind(splits=SPLITS):
    return {(item.degree, item.sequence_parallel): item for item in traced(*splits).splits}


def at(expression, rows=4, length=32):
    return int(sympy.sympify(expression).subs({MICROBATCH: rows, SEQUENCE: length}))


@pytest.mark.thorough
def test_every_split_has_costs():
    assert set(by_kind()) == {(2, False), (2, True), (4, False), (4, True)}
    assert not traced(*SPLITS).module_map.excludes("tensor")


@pytest.mark.parametrize("degree", tiered([2, 4], [2]))
@pytest.mark.parametrize("sequence", [False, True])
def test_matrix_products_are_shared_out(degree, sequence):
    splits = ALONE[degree]
    whole, part = traced(*splits).layers[0], by_kind(splits)[degree, sequence].layers[0]
    for name in ("forward_flops", "backward_flops", "weight_flops"):
        assert at(getattr(whole, name)) == degree * at(getattr(part, name))
    assert at(part.saved_bytes) < at(whole.saved_bytes)
    assert at(part.first_backward_peak_bytes) < at(whole.first_backward_peak_bytes)
    # The tied projection stays whole; every rank has a part of the sequence to project.
    tail = at(by_kind(splits)[degree, sequence].tail.forward_flops)
    assert at(traced(*splits).tail.forward_flops) == tail * (degree if sequence else 1)


@pytest.mark.parametrize("degree", tiered([2, 4], [2]))
def test_what_ranks_exchange(degree):
    hidden = 4 * MICROBATCH * SEQUENCE * WIDTH
    part, along = (by_kind(ALONE[degree])[degree, sequence].layers[0] for sequence in (False, True))
    # One sum behind attention and one behind the perceptron, in backward in front of them.
    for found in (part.forward_collectives, part.backward_collectives):
        (only,) = found
        assert (only.operation, only.calls) == ("all_reduce", 2)
        assert sympy.expand(only.bytes - 2 * hidden) == 0
    for found in (along.forward_collectives, along.backward_collectives):
        exchanged = {item.operation: item for item in found}
        for operation in ("all_gather", "reduce_scatter"):
            assert exchanged[operation].calls == 2
            assert sympy.expand(exchanged[operation].bytes - 2 * hidden) == 0


def test_sequence_parallelism_saves_parts_of_norms_and_hands_on_parts():
    whole, along = by_kind(TWO)[2, False], by_kind(TWO)[2, True]
    assert at(along.layers[0].saved_bytes) < at(whole.layers[0].saved_bytes)
    for cut, shrunk in zip(traced(*TWO).boundaries, along.boundaries, strict=True):
        assert [at(tensor.bytes) for tensor in cut] == [2 * at(tensor.bytes) for tensor in shrunk]
    assert whole.boundaries == traced(*TWO).boundaries


def test_parameters_are_held_in_part():
    spec = traced(*TWO)
    sizes = dict(zip((item.name for item in spec.parameters), by_kind(TWO)[2, False].parameter_bytes, strict=True))
    for item in spec.parameters:
        assert sizes[item.name] == (item.bytes if SPLITS[0].of(item.name) is None else item.bytes // 2)
    # A norm's weights, a row-split layer's bias.
    assert sizes["transformer.h.0.ln_1.weight"] == 4 * WIDTH
    assert sizes["transformer.h.0.attn.c_proj.bias"] == 4 * WIDTH
    part = spec.split(2)
    assert sum(item.bytes for item in part.parameters) == sum(sizes.values())


def test_the_whole_costs_the_same_with_and_without_splits():
    with_splits, without = traced(*TWO), traced()
    assert without.splits == ()
    assert (with_splits.head, with_splits.layers, with_splits.tail) == (without.head, without.layers, without.tail)


def test_what_cannot_be_traced_is_excluded_with_the_reason():
    # Seven does not divide the width.
    spec = traced(split_of(7, sequence=False))
    assert spec.splits == ()
    (reason,) = spec.module_map.excludes("tensor")
    assert reason.startswith("the costs of tensor_parallel_degree 7 cannot be traced")
