from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fakes.isolate import isolated, substitute_parameters
from lightning_mist.model.spec.polynomial import MICROBATCH, QUADRATIC, Basis, MisfitError
from lightning_mist.model.trace.block_kinds import Example
from lightning_mist.model.trace.counted_step import Subject
from lightning_mist.model.trace.layer_costs import layer_specs, not_recomputed
from lightning_mist.model.trace.modes import run_ways
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
