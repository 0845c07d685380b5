from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model import trace_model
from lightning_mist.model.fakes.fake_modules import isolated, substitute_parameters
from lightning_mist.model.spec import MICROBATCH
from lightning_mist.model.spec.allocation_events import Allocation, PartEvents, StepPoint
from lightning_mist.model.spec.polynomial import CONSTANT, QUADRATIC, Basis, MisfitError
from lightning_mist.model.trace.counted_step import Example, Subject
from lightning_mist.model.trace.layer_costs import layer_events, layer_specs, not_recomputed, run_ways
from tests import zoo
from tests.model.trace.test_counted_step import Chain

BASIS = Basis(powers=QUADRATIC, points=((2, 1), (3, 1), (5, 1)), check=(7, 1))


@contextmanager
def subject_of(module):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with isolated(module):
        yield Subject(
            module=module,
            blocks=tuple(module.blocks),
            parameters=substitute_parameters(module, mode, {}),
            mode=mode,
            call=module.training_step,
            context=nullcontext,
        )


def ways(*, recomputes=True, basis=BASIS, twins=(None, None)):
    with subject_of(Chain()) as subject:
        return run_ways(subject, basis, lambda size: torch.ones(size[0], 4), twins, recomputes=recomputes)


def spec_of(counted, part=1):
    example = Example(part=part, follower=None, label="block", block="blocks.0")
    return layer_specs(counted, [example], is_fake=True)[0]


def test_expressions_of_a_block_by_hand():
    part = spec_of(ways())
    row = 8 * 4 * MICROBATCH
    assert sympy.expand(part.forward_flops - 2 * 64 * MICROBATCH) == 0
    assert sympy.expand(part.backward_flops - 4 * 64 * MICROBATCH) == 0
    assert sympy.expand(part.saved_bytes - row) == 0
    assert sympy.expand(part.checkpointed_saved_bytes - row) == 0
    assert sympy.expand(part.forward_peak_bytes - 2 * row) == 0
    assert part.forward_operators == 2
    assert part.backward_operators == 4  # sigmoid, two products, and the addition to a gradient that is there
    assert (part.kind, part.example, part.forward_collectives) == ("block", "blocks.0", ())


def test_peaks_are_those_of_the_timelines_at_every_size():
    counted = ways()
    for part in range(4):
        spec = spec_of(counted, part)
        for (rows, _), run in zip(BASIS.sizes, counted.first.runs, strict=True):
            at = {MICROBATCH: rows}
            assert spec.forward_peak_bytes.subs(at) == max(run.forward_peaks(part))
            assert spec.first_backward_peak_bytes.subs(at) == max(run.backward_peaks(part))
            assert spec.saved_bytes.subs(at) == run.saved[part]


def test_without_recomputation_its_costs_are_those_of_keeping_everything():
    kept = ways(recomputes=False)
    assert kept.recomputed_first is kept.first
    assert kept.recomputed_later is kept.later
    part = spec_of(kept)
    high = sympy.Integer(10**9)
    fixed = not_recomputed(replace(part, recompute_backward_peak_bytes=high, first_recompute_backward_peak_bytes=high))
    assert fixed.recompute_backward_peak_bytes == part.backward_peak_bytes
    assert fixed.first_recompute_backward_peak_bytes == part.first_backward_peak_bytes


def test_a_part_whose_operators_depend_on_the_size_has_no_expressions():
    counted = ways()
    counted.first.runs[1].forward[1].work.append(("copy", 0, 8))
    with pytest.raises(MisfitError, match="the number of operators of the block's forward depends on the size"):
        spec_of(counted)


def counted(module, basis=BASIS, **how):
    with subject_of(module) as subject:
        twins = (None,) * len(module.blocks)
        return run_ways(subject, basis, lambda size: torch.ones(size[0], 4), twins, recomputes=True, **how)


def test_other_ways_are_run_at_two_sizes_and_know_the_sizes_of_all():
    ways = counted(Chain())
    assert len(ways.first.runs) == len(BASIS.sizes)
    for way in (ways.later, ways.recomputed_first, ways.recomputed_later):
        assert len(way.runs) == 2
        for run, (rows, _) in zip(way.runs, (BASIS.sizes[0], BASIS.sizes[-1]), strict=True):
            sizes = [BASIS.polynomial(size).at(rows) for size in way.sizes]
            assert sizes == [storage.bytes for storage in run.storages]
    assert ways.batch_bytes == tuple(16 * rows for rows, _ in BASIS.sizes)


def test_what_is_recomputed_has_the_size_of_what_it_repeats():
    ways = counted(Chain())
    again = [
        (s.operator, size)
        for s, size in zip(ways.recomputed_first.run.storages, ways.recomputed_first.sizes, strict=True)
        if s.cause == "recompute" and s.part == 1
    ]
    plain = [
        (s.operator, size)
        for s, size in zip(ways.first.run.storages, ways.first.sizes, strict=True)
        if s.cause == "forward" and s.part == 1
    ]
    assert again == plain
    assert len(again) == 2


def test_a_way_that_does_other_things_is_run_at_every_size():
    class Other(Chain):
        """Makes more once gradients exist."""

        def training_step(self, x):
            has_gradient = self.outlet.weight.grad is not None
            return super().training_step(x) + ((x + 1).sum() * 2 if has_gradient else 0)

    ways = counted(Other())
    assert len(ways.later.runs) == len(BASIS.sizes)
    run = ways.later.runs[1]
    assert [BASIS.polynomial(size).at(BASIS.sizes[1][0]) for size in ways.later.sizes] == [
        s.bytes for s in run.storages
    ]


def test_caches_that_a_first_run_fills_are_not_counted():
    class Caching(Chain):
        def __init__(self):
            super().__init__()
            self.mask = None

        def training_step(self, x):
            if self.mask is None or self.mask.shape != x.shape:
                self.mask = torch.ones_like(x) * 2
            return super().training_step(x * self.mask)

    ways = counted(Caching())
    assert {run.forward[0].operators for run in ways.first.runs} == {2}
    assert len(ways.later.runs) == 2


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: [x + 1 for _ in range(len(x))].pop(), "the number of allocations depends on the size"),
        (lambda x: x + 1 if len(x) % 2 else x * 1, "is another one at other sizes"),
        (lambda x: x.new_ones(len(x) ** 3)[: len(x), None] * x, "the size of an allocation by aten.new_ones"),
    ],
)
def test_allocations_that_cannot_be_matched_are_refused(step, words):
    class Odd(Chain):
        def training_step(self, x):
            return super().training_step(step(x))

    with pytest.raises(MisfitError, match=words):
        counted(Odd())


def test_a_constant_basis_has_one_size():
    ways = counted(Chain(), Basis(powers=CONSTANT, points=((5, 1),), check=None))
    assert [len(way.runs) for way in (ways.first, ways.later)] == [1, 1]
    assert isinstance(ways.first.run.storages, tuple)


def test_without_blocks_there_are_two_ways():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.inner = (), nn.Linear(4, 1)

        def training_step(self, x):
            return self.inner(x).sum()

    ways = counted(Flat())
    assert ways.recomputed_first is ways.first
    assert ways.recomputed_later is ways.later


EXAMPLES = (
    Example(part=0, follower=None, label="head", block=""),
    Example(part=1, follower=2, label="block", block="blocks.0"),
    Example(part=3, follower=None, label="tail", block=""),
)


def events_of(module, twins=(None, None)):
    with subject_of(module) as subject:
        ways = run_ways(subject, BASIS, lambda size: torch.ones(size[0], 4), twins, recomputes=True)
    return layer_events(ways, EXAMPLES, is_fake=True)


def brief(allocation: Allocation) -> tuple[object, ...]:
    """What was made, its role, and when it dies."""
    dies = allocation.dies
    place = None if dies is None else (dies.part, dies.direction, dies.position)
    return allocation.operator.split(".")[1], allocation.role, allocation.born.position, place


def test_events_of_a_chain_by_hand():
    head, block, tail = (events.first for events in events_of(Chain()))
    # The product is gone when the block has returned; sigmoid keeps its own result: no other part frees it.
    assert [brief(item) for item in block.forward] == [
        ("mm", "temporary", 1, (0, "forward", 3)),
        ("sigmoid", "activation", 2, (0, "backward", 2)),
    ]
    assert [brief(item) for item in block.backward] == [
        ("sigmoid_backward", "temporary", 1, (0, "backward", 4)),
        ("mm", "gradient", 2, None),
        ("mm", "gradient", 3, (-1, "backward", 2)),
    ]
    assert (block.forward_positions, block.backward_positions) == (2, 3)
    assert [item.slot for item in block.backward] == [None, None, 0]
    # The head's result is handed on, and the block lets go of it with the gradient of its weight.
    assert [(brief(item), item.slot) for item in head.forward] == [(("mm", "activation", 1, (1, "backward", 4)), 0)]
    assert block.entering[0].dies == StepPoint(direction="backward", position=4)
    assert block.arriving[0].dies == StepPoint(direction="backward", position=2)
    assert head.entering == tail.arriving == ()
    row = 8 * 4 * MICROBATCH
    assert [item.size.expression for item in block.forward] == [row, row]
    assert [item.dtype for item in block.forward] == ["float32", "float32"]


def test_gradients_that_exist_already_are_added_to_and_die():
    block = events_of(Chain())[1].later
    assert [(item.parameter, item.dies) for item in block.backward if item.parameter] == [
        ("0.weight", StepPoint(direction="backward", position=5))  # both products, then the addition
    ]


def test_recomputation_comes_first_in_backward_and_says_where_it_comes_from():
    first, again = (getattr(events_of(Chain())[1], way) for way in ("first", "recomputed_first"))
    assert [brief(item)[:2] for item in again.backward[:2]] == [("mm", "temporary"), ("sigmoid", "temporary")]
    assert [(item.module, item.line) for item in again.backward[:2]] == [
        ("0", first.forward[0].line),
        ("1", first.forward[1].line),
    ]
    # What the block hands on is no longer its own to keep.
    assert [(item.slot, item.dies.part) for item in again.forward if item.role == "activation"] == [(0, 1)]


def test_what_gradients_of_weights_are_made_of_is_known():
    head, block, tail = (events.recomputed_first for events in events_of(Chain()))
    assert [item.weights for item in block.backward if item.operator == "aten.sigmoid_backward.default"] == [
        ("0.weight",)
    ]
    assert block.entering[0].weights == ("0.weight",)
    assert head.arriving[0].weights == ("inlet.weight",)
    assert tail.entering[0].weights == ("outlet.weight",)
    assert all(item.weights == () for item in (*head.forward, *block.forward))


def positions_are_within(events: PartEvents) -> bool:
    last = {"forward": events.forward_positions, "backward": events.backward_positions}
    own = [
        item
        for item in (*events.forward, *events.backward)
        if item.dies and (item.dies.part, item.dies.anchor) == (0, "own")
    ]
    return all(item.dies.position <= last[item.dies.direction] + 1 for item in own)


@pytest.mark.thorough
def test_a_real_network_says_where_its_bytes_come_from():
    module, make_batch = zoo.make("llama")
    spec = trace_model(module, make_batch(4), call=zoo.step(module), optimizer=torch.optim.SGD)
    events = spec.layers[0].events.first
    up = next(item for item in events.forward if item.module == "mlp.up_proj")
    assert (up.operator, up.role, up.line.split(":")[0]) == ("aten.mm.default", "activation", "modeling_llama.py")
    product = next(item for item in events.forward if item.module == "mlp" and item.role == "activation")
    assert product.weights == ("mlp.down_proj.weight",)
    gradients = {item.parameter for item in events.backward if item.dies is None}
    assert gradients == {name for name, _ in module.model.model.layers[0].named_parameters()}
    masks = [item for item in spec.head.events.first.forward if item.role == "shared"]
    assert sum(item.size.at(4, 12) for item in masks if item.dies.direction == "backward") == 2 * 4 * 8 * 12
    assert all(positions_are_within(way) for part in (spec.head, *spec.layers, spec.tail) for way in ways_of(part))
    saved = [item.size.expression for item in events.forward if item.dies.direction == "backward"]
    assert sum(saved) == spec.layers[0].saved_bytes


def ways_of(part):
    events = part.events
    return events.first, events.later, events.recomputed_first, events.recomputed_later


def test_the_same_events_come_from_imitated_neighbours():
    class Long(Chain):
        def __init__(self):
            super().__init__()
            self.blocks.extend(Chain().blocks)

    examples = (*EXAMPLES[:2], replace(EXAMPLES[2], part=5))
    found = []
    for twins in ((None,) * 4, (None, None, 0, None)):
        with subject_of(Long()) as subject:
            ways = run_ways(subject, BASIS, lambda size: torch.ones(size[0], 4), twins, recomputes=True)
        found.append(layer_events(ways, examples, is_fake=True))
    assert found[0] == found[1]
