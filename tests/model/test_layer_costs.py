from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fit import QUADRATIC, Basis, MisfitError
from lightning_mist.model.isolate import isolated, substitute_parameters
from lightning_mist.model.layer_costs import layer_spec, not_recomputed, run_variants
from lightning_mist.model.step import Subject
from lightning_mist.model.symbols import MICROBATCH
from tests.model.test_step import Chain

BASIS = Basis(powers=QUADRATIC, points=((2, 1), (3, 1), (5, 1)), check=(7, 1))


@contextmanager
def subject_of(module):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with isolated(module):
        yield Subject(
            module=module,
            blocks=tuple(module.blocks),
            parameters=tuple(substitute_parameters(module, mode, {}).values()),
            mode=mode,
            call=module.training_step,
            context=nullcontext,
        )


def runs(*, recomputes=True, sizes=BASIS.sizes):
    with subject_of(Chain()) as subject:
        return [run_variants(subject, torch.ones(rows, 4), (None, None), recomputes=recomputes) for rows, _ in sizes]


def test_expressions_of_a_block_by_hand():
    part = layer_spec(BASIS, runs(), 1, "block", "blocks.0")
    row = 8 * 4 * MICROBATCH
    assert sympy.expand(part.forward_flops - 2 * 64 * MICROBATCH) == 0
    assert sympy.expand(part.backward_flops - 4 * 64 * MICROBATCH) == 0
    assert sympy.expand(part.saved_bytes - row) == 0
    assert sympy.expand(part.checkpointed_saved_bytes - row) == 0
    assert part.forward_operators == 2
    assert part.backward_operators == 4  # sigmoid, two products, and the addition to a gradient that is there
    assert (part.kind, part.example, part.forward_collectives) == ("block", "blocks.0", ())


def test_without_recomputation_its_costs_are_those_of_keeping_everything():
    kept = runs(recomputes=False)
    assert all(run.recompute_first is run.first and run.recompute_later is run.later for run in kept)
    assert [run.batch_bytes for run in kept] == [16 * rows for rows, _ in BASIS.sizes]
    part = layer_spec(BASIS, kept, 1, "block", "blocks.0")
    high = sympy.Integer(10**9)
    fixed = not_recomputed(replace(part, recompute_backward_peak_bytes=high, first_recompute_backward_peak_bytes=high))
    assert fixed.recompute_backward_peak_bytes == part.backward_peak_bytes
    assert fixed.first_recompute_backward_peak_bytes == part.first_backward_peak_bytes


def test_counts_of_other_sizes_than_the_basis_says_fit_no_polynomial():
    crooked = runs(sizes=((2, 1), (3, 1), (5, 1), (9, 1)))
    with pytest.raises(MisfitError, match="of the block"):
        layer_spec(BASIS, crooked, 1, "block", "blocks.0")
