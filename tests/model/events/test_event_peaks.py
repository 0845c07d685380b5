"""Peaks from events, against those that a trace counts."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model import trace_model
from lightning_mist.model.events.event_peaks import part_peaks, place_step, target_part, timeline_of
from lightning_mist.model.fakes.fake_modules import isolated, resize_batch, substitute_parameters
from lightning_mist.model.spec.allocation_events import StepPoint
from lightning_mist.model.trace.counted_step import Subject, count_step
from lightning_mist.model.trace.ledger import PhaseCount
from tests import zoo
from tests.tiers import tiered

NAMES = ("forward", "backward", "first_backward", "recompute_backward", "first_recompute_backward")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nano", "nano_dropout"])
def test_peaks_are_those_of_the_trace(name):
    module, make_batch = zoo.make(name)
    spec = trace_model(module, make_batch(2), optimizer=torch.optim.AdamW)
    assert len(spec.layers) == 1
    parts = (spec.head, spec.layers[0], spec.tail)
    found = part_peaks(*(part.events for part in parts))
    for part, peaks in zip(parts, found, strict=True):
        for each in NAMES:
            assert peaks[f"{each}_peak_bytes"] == getattr(part, f"{each}_peak_bytes")


MAKERS = {"llama": zoo.llama, "gpt2": zoo.gpt2, "bert": zoo.bert, "vit": zoo.vit}
BATCHES = {"llama": zoo.token_batch, "gpt2": zoo.token_batch, "bert": zoo.token_batch, "vit": zoo.image_batch}


@cache
def traced(name, layers=3):
    module = MAKERS[name](layers).train()
    return trace_model(module, BATCHES[name](2), call=zoo.step(module), optimizer=torch.optim.SGD)


def metered(name, layers, batch, **how):
    """Bytes alive at every reading of a step of a deeper network in which every block runs."""
    module = MAKERS[name](layers).train()
    inner = {"llama": "model.layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer", "vit": "vit.layers"}[name]
    with isolated(module):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        own = {(name, slot): name for name, item in module.named_modules() for slot in item._parameters}
        parameters = substitute_parameters(module, mode, own)
        subject = Subject(
            module=module,
            blocks=tuple(module.model.get_submodule(inner)),
            parameters=parameters,
            mode=mode,
            call=zoo.step(module),
            context=nullcontext,
        )
        count = count_step(subject, batch, twins=(None,) * layers, **how)
    return [alive for phase in in_order(count.forward, count.backward) for alive in phase.timeline]


def step_parts(spec, *, recomputed_layers=0, first=False):
    """Events of head, layers and tail, the first layers being recomputed."""
    items = (spec.head, *(spec.layers[kind] for kind in spec.kinds), spec.tail)
    last = len(items) - 1
    return tuple(
        item.events.way(recomputed=recomputed_layers >= (1 if index in (0, last) else index), first=first)
        for index, item in enumerate(items)
    )


def in_order(forward: tuple[PhaseCount, ...], backward: tuple[PhaseCount, ...]) -> list[PhaseCount]:
    return [*forward, *reversed(backward)]


@pytest.mark.sample
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", tiered(MAKERS, ("gpt2",)))
def test_three_traced_layers_say_every_byte_of_five_at_another_size(name, recompute, first):
    rows, length = 5, 7 if name != "vit" else None
    batch = resize_batch(BATCHES[name](2), rows, length)
    truth = metered(name, 5, batch, recompute=recompute, gradients_exist=not first)
    spec = replace(traced(name), kinds=(0,) * 5)
    parts = step_parts(spec, recomputed_layers=5 * recompute, first=first)
    assert timeline_of(parts, rows, length or 1) == truth


@pytest.mark.thorough
def test_the_first_layers_alone_may_be_recomputed():
    spec = traced("llama")
    none, two, all_layers = (max(timeline_of(step_parts(spec, recomputed_layers=count), 64, 64)) for count in (0, 2, 3))
    assert none > two > all_layers


def test_allocations_come_in_order_and_die_after_they_are_born():
    placed = place_step(step_parts(traced("gpt2"), first=True))
    assert [item.born for item in placed] == sorted(item.born for item in placed)
    assert all(item.born < item.dies for item in placed)
    gradients = [item.allocation for item in placed if item.allocation.dies is None and item.allocation.parameter]
    spec = traced("gpt2")
    assert {a.parameter for a in gradients} >= {
        "attn.c_attn.weight",
        "mlp.c_proj.bias",
        "model.transformer.ln_f.weight",
    }
    # The tied table has a gradient of its own in head and tail.
    total = sum(p.bytes for p in spec.parameters) + 4 * 32 * zoo.VOCABULARY
    assert sum(a.size.at(2, 12) for a in gradients) == total


def test_moments_are_told_from_where_they_are_anchored():
    def at(part, anchor):
        return StepPoint(part=part, anchor=anchor, direction="forward", position=0)

    assert [target_part(3, at(part, "own"), 6) for part in (-1, 0, 1)] == [2, 3, 4]
    assert target_part(3, at(1, "head"), 6) == 1
    assert target_part(3, at(-1, "tail"), 6) == 4
