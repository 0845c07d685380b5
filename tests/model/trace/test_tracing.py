import copy
import random
import re
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import nn

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.model import ModelSpec, trace_model
from lightning_mist.model.fakes.fake_modules import isolated, resize_batch, substitute_parameters
from lightning_mist.model.spec import MICROBATCH, SEQUENCE, LayerSpec, OperatorCost
from lightning_mist.model.spec.polynomial import BILINEAR, CONSTANT, QUADRATIC
from lightning_mist.model.spec.polynomial import MICROBATCH as b
from lightning_mist.model.spec.polynomial import SEQUENCE as s
from lightning_mist.model.trace.counted_step import StepCount, Subject, count_step
from lightning_mist.model.trace.ledger import PhaseCount
from lightning_mist.model.trace.tracing import bases, sized
from lightning_mist.plan import AS_IT_IS, StageMethod
from tests import zoo
from tests.specs import moved_bytes
from tests.tiers import tiered

WIDTH, INNER = 8, 24


class Perceptron(nn.Module):
    """A block whose costs are easily written down."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers: int = 3, block: type[nn.Module] = Perceptron) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.outlet = nn.Linear(WIDTH, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        x = self.inlet(batch)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).mean()


@cache
def traced(name: str) -> tuple[ModelSpec, nn.Module, Any]:
    module, make_batch = zoo.make(name)
    batch = make_batch(4)
    return trace_model(module, batch, call=zoo.step(module), optimizer=torch.optim.SGD), module, batch


def at(expression: sympy.Expr, b: int, s: int = 1) -> int:
    value = expression.subs({MICROBATCH: b, SEQUENCE: s})
    assert value.is_Integer
    return int(value)


def real_count(module: nn.Module, spec: ModelSpec, call: Any, batch: Any, **how: bool) -> StepCount:
    """The same counts on real numbers with every block run."""
    blocks = tuple(module.get_submodule(name) for name in spec.module_map.blocks)
    owners = {(n, a): regions for use in spec.module_map.parameters for n, a, regions in use.slots if regions}
    with isolated(module):
        parameters = substitute_parameters(module, None, owners)
        subject = Subject(
            module=module, blocks=blocks, parameters=parameters, mode=None, call=call, context=nullcontext
        )
        count_step(subject, batch, twins=(None,) * len(blocks), recompute=False, gradients_exist=False)
        return count_step(subject, batch, twins=(None,) * len(blocks), **how)


def by_kind(work: Iterable[OperatorCost], b: int, s: int) -> dict[str, list[int]]:
    """FLOPs, bytes and calls of every kind of operator."""
    sums: dict[str, list[int]] = {}
    for item in work:
        known = sums.get(item.kind, [0, 0, 0])
        found = (at(item.flops, b, s), at(item.moved_bytes, b, s), item.calls)
        sums[item.kind] = [x + y for x, y in zip(known, found, strict=True)]
    return sums


def counted_by_kind(phase: PhaseCount) -> dict[str, list[int]]:
    sums: dict[str, list[int]] = {}
    for kind, flops, moved in phase.work:
        sums[kind] = [x + y for x, y in zip(sums.get(kind, [0, 0, 0]), (flops, moved, 1), strict=True)]
    return sums


def parts(spec: ModelSpec) -> list[LayerSpec]:
    return [spec.head, *(spec.layers[kind] for kind in spec.kinds), spec.tail]


@pytest.mark.parametrize("name", tiered(["llama_tied", "nano", "gpt2_dropout"], ["nano"]))
def test_expressions_hold_on_real_numbers_at_sizes_that_were_not_traced(name: str) -> None:
    spec, module, batch = traced(name)
    b, s = 5, 7 if spec.sequence_length else 1
    other = resize_batch(batch, b, s if spec.sequence_length else None)
    call = zoo.step(module)
    first = real_count(module, spec, call, other, recompute=False, gradients_exist=False)
    later = real_count(module, spec, call, other, recompute=False, gradients_exist=True)
    again = real_count(module, spec, call, other, recompute=True, gradients_exist=True)
    for index, part in enumerate(parts(spec)):
        assert at(part.forward_flops, b, s) == first.forward[index].flops
        assert at(part.backward_flops, b, s) == first.backward[index].flops
        assert at(moved_bytes(part.forward_work), b, s) == first.forward[index].moved_bytes
        assert at(part.saved_bytes, b, s) == first.saved[index]
        assert at(part.forward_peak_bytes, b, s) == max(first.forward_peaks(index))
        assert at(part.first_backward_peak_bytes, b, s) == max(first.backward_peaks(index))
        assert at(part.backward_peak_bytes, b, s) == max(later.backward_peaks(index))
        assert part.backward_operators == later.backward[index].operators
        assert by_kind(part.forward_work, b, s) == counted_by_kind(first.forward[index])
        assert by_kind(part.backward_work, b, s) == counted_by_kind(later.backward[index])
        assert at(part.checkpointed_saved_bytes, b, s) == again.saved[index]
        if 0 < index <= spec.num_layers:
            assert at(part.recompute_backward_peak_bytes, b, s) == max(again.backward_peaks(index))


def test_costs_of_a_perceptron_block_written_down_by_hand() -> None:
    spec = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert spec.kinds == (0, 0, 0)
    (layer,) = spec.layers
    b = MICROBATCH
    assert layer.forward_flops == 2 * 2 * WIDTH * INNER * b
    assert layer.backward_flops == 2 * layer.forward_flops
    # Kept: the activation after relu (for relu and the second product), and the sum that it hands on. The input is the
    # block's before it.
    assert layer.saved_bytes == 4 * (INNER + WIDTH) * b
    assert layer.checkpointed_saved_bytes == 4 * WIDTH * b
    # Most is alive when relu's result stands beside the product it came from.
    assert layer.forward_peak_bytes == 4 * 2 * INNER * b
    assert spec.batch_bytes == 4 * 4 * b
    assert [str(t.shape) for cut in spec.boundaries for t in cut] == [f"(b, {WIDTH})"] * 2
    assert sum(p.bytes for p in spec.parameters) == sum(p.numel() * 4 for p in Stack().parameters())
    # The first backward leaves the block's gradients behind, later ones add to them.
    gradients = 4 * (2 * WIDTH * INNER + INNER + WIDTH)
    small = at(layer.first_backward_peak_bytes, 1) - at(layer.backward_peak_bytes, 1)
    assert 0 < small <= gradients


def test_attention_keeps_its_operands_and_its_scores_row_by_row() -> None:
    spec, _, _ = traced("nano")
    layer, b, s, width, heads = spec.layers[0], MICROBATCH, SEQUENCE, 32, 4
    products = 2 * b * s * (3 * width * width + width * width + 8 * width * width)
    assert sympy.expand(layer.forward_flops - products - 4 * b * s**2 * width) == 0
    # Kept: twice result, mean and deviation of a norm; queries, keys and values; attention's result and log-sum-exp;
    # the sum after attention; the inner activation before and after gelu; the sum at the end.
    norms = 2 * (4 * width + 8)
    kept = 4 * (3 * width) + 4 * width + 4 * heads + 4 * width + 2 * 4 * 4 * width + 4 * width
    assert sympy.expand(layer.saved_bytes - b * s * (norms + kept)) == 0
    assert layer.checkpointed_saved_bytes == 4 * width * b * s


def test_weights_cast_by_autocast_are_kept_for_backward() -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    plain = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    mixed = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD, context=autocast, precision="bf16-mixed")
    assert mixed.precision == "bf16-mixed"
    cast_weights = 2 * 2 * WIDTH * INNER
    assert at(mixed.layers[0].saved_bytes, 0) == cast_weights
    assert at(plain.layers[0].saved_bytes, 0) == 0


class Tied(Stack):
    """The outlet multiplies by the inlet's weight, as language models do with their embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.outlet = nn.Linear(WIDTH, 4, bias=False)
        self.inlet = nn.Linear(4, WIDTH, bias=False)
        if tied:
            self.outlet.weight = nn.Parameter(torch.ones(WIDTH, 4).t())
            self.inlet = nn.Module()
            self.inlet.weight = self.outlet.weight
            self.inlet.forward = lambda x: x @ self.inlet.weight  # type: ignore[method-assign]


def test_a_tied_weight_has_a_gradient_in_both_its_parts() -> None:
    spec = trace_model(Tied(tied=True), torch.randn(6, 4), optimizer=torch.optim.SGD)
    other = trace_model(Tied(tied=False), torch.randn(6, 4), optimizer=torch.optim.SGD)
    weight = 4 * 4 * WIDTH
    for part in (spec.head, spec.tail, other.tail):
        assert at(part.first_backward_peak_bytes, 0) - at(part.backward_peak_bytes, 0) in (0, weight)
    assert spec.tail.first_backward_peak_bytes == other.tail.first_backward_peak_bytes
    assert len(spec.parameters) == len(other.parameters) - 1


@pytest.mark.thorough
def test_masks_that_every_stage_computes_are_told_apart() -> None:
    spec, _, _ = traced("llama_tied")
    assert at(spec.shared_saved_bytes, 4, 12) == 2 * 4 * 8 * 12  # cosine and sine tables of 8 numbers per position
    assert at(traced("nano")[0].shared_saved_bytes, 4, 12) == 8 * 12  # positions


def test_blocks_that_differ_are_kinds_of_their_own() -> None:
    class Sized(Stack):
        def __init__(self) -> None:
            super().__init__(layers=4)
            self.blocks[2].up = nn.Linear(WIDTH, 2 * INNER)
            self.blocks[2].down = nn.Linear(2 * INNER, WIDTH)

    spec = trace_model(Sized(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert spec.kinds == (0, 0, 1, 0)
    assert [layer.kind for layer in spec.layers] == ["Perceptron", "Perceptron#2"]
    assert [layer.example for layer in spec.layers] == ["blocks.0", "blocks.2"]
    assert spec.layers[1].forward_flops == 2 * spec.layers[0].forward_flops


def test_forty_eight_layers_cost_what_three_do_each() -> None:
    few = trace_model(Stack(3), torch.randn(6, 4), optimizer=torch.optim.SGD)
    many = trace_model(Stack(48), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert many.kinds == (0,) * 48
    assert [many.head, *many.layers, many.tail] == [few.head, *few.layers, few.tail]


def test_without_blocks_the_head_is_the_whole_step() -> None:
    spec, module, batch = traced("no_blocks")
    assert (spec.layers, spec.kinds, spec.boundaries) == ((), (), ())
    count = real_count(module, spec, zoo.step(module), batch, recompute=False, gradients_exist=True)
    assert at(spec.head.backward_flops, 4) == count.backward[0].flops > 0
    assert at(spec.head.backward_peak_bytes, 4) == max(count.backward_peaks(0))
    assert (spec.tail.forward_flops, spec.tail.saved_bytes, spec.tail.backward_peak_bytes) == (0, 0, 0)


def test_a_loss_over_pairs_of_rows_grows_with_their_square() -> None:
    class Pairs(Stack):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            x = self.inlet(batch)
            for block in self.blocks:
                x = block(x)
            return {"loss": (x @ x.t()).mean()}

    spec = trace_model(Pairs(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert sympy.expand(spec.tail.forward_flops - 2 * WIDTH * MICROBATCH**2) == 0


def test_a_step_that_does_not_run_on_fakes_is_counted_on_real_numbers() -> None:
    class Selecting(Stack):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + self.outlet.weight[self.outlet.weight.nonzero(as_tuple=True)].sum()

    spec = trace_model(Selecting(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert "It was counted on real tensors instead" in spec.notes[0]
    plain = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert spec.layers == plain.layers


def test_costs_that_depend_on_the_values_are_known_for_whole_batches_only() -> None:
    class Branching(Stack):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            x = self.inlet(batch)
            for _ in range(len(batch) % 5):
                x = torch.tanh(x)
            for block in self.blocks:
                x = block(x)
            return self.outlet(x).mean()

    spec = trace_model(Branching(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert spec.module_map.excludes("microbatches")[0].startswith("its costs are known only for whole batches: ")
    assert spec.head.forward_flops == 2 * 6 * 4 * WIDTH


def test_blocks_that_fail_in_recomputation_are_not_recomputed() -> None:
    class Once(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() >= 0:
                raise KeyError("only in forward")
            return super().forward(x)

    spec = trace_model(Stack(block=Once), torch.randn(6, 4), optimizer=torch.optim.SGD)
    reasons = " ".join(spec.module_map.excludes("checkpointing"))
    assert "a block cannot be run a second time in backward: KeyError: 'only in forward'" in reasons
    assert spec.layers[0].checkpointed_saved_bytes == spec.layers[0].saved_bytes


def test_blocks_that_read_what_is_gone_in_backward_are_counted_without_recomputation() -> None:
    spec, _, _ = traced("closure")
    assert spec.module_map.excludes("checkpointing")
    assert all(layer.checkpointed_saved_bytes == layer.saved_bytes for layer in spec.layers)


def test_events_that_do_not_make_up_the_whole_step_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert whole.notes == ()
    assert all(part.events is not None for part in parts(whole))
    monkeypatch.setattr("lightning_mist.model.trace.tracing.timeline_of", lambda *_: [])
    spec = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert spec.notes[0].startswith("allocations are known in sum and not one by one")
    assert all(part.events is None for part in parts(spec))
    assert [part.saved_bytes for part in parts(spec)] == [part.saved_bytes for part in parts(whole)]


def test_a_value_read_for_logging_is_guessed_and_noted() -> None:
    class Logging(Stack):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.last = loss.item()
            return loss

    spec = trace_model(Logging(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    (note,) = spec.notes
    assert re.fullmatch(
        r"the step reads 1 values into Python at \S+test_tracing.py:\d+; branches .* for False or 1", note
    )
    assert spec.layers == trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD).layers


def test_checkpointing_by_the_user_is_the_plan_s_to_decide() -> None:
    spec, _, _ = traced("user_checkpoint")
    assert at(spec.layers[0].saved_bytes, 4) > at(spec.layers[0].checkpointed_saved_bytes, 4)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["nano_dropout", "batch_norm", "counter"])
def test_nothing_about_the_module_changes(name: str) -> None:
    module, make_batch = zoo.make(name)
    batch = make_batch(4)
    loss = zoo.loss_of(zoo.step(module)(batch))
    loss.backward()
    parameters = {n: (p, p.detach().clone(), p.grad, p.grad.clone()) for n, p in module.named_parameters()}
    buffers = {n: (b, b.clone()) for n, b in module.named_buffers()}
    spaces = {n: {k: repr(v) for k, v in vars(m).items()} for n, m in module.named_modules()}
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    spoiled = copy.deepcopy(batch)
    trace_model(module, batch, call=zoo.step(module))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for n, p in module.named_parameters():
        original, value, grad_object, grad = parameters[n]
        assert p is original
        assert torch.equal(p, value)
        assert p.grad is grad_object
        assert torch.equal(p.grad, grad)
    for n, buffer in module.named_buffers():
        assert buffer is buffers[n][0]
        assert torch.equal(buffer, buffers[n][1])
    assert {n: {k: repr(v) for k, v in vars(m).items()} for n, m in module.named_modules()} == spaces
    assert repr(batch) == repr(spoiled)


def test_a_failing_step_is_refused_with_its_own_words() -> None:
    module, make_batch = zoo.make("broken")
    with pytest.raises(TraceError, match="the step cannot be traced: RuntimeError: no such column: price"):
        trace_model(module, make_batch(2), call=zoo.step(module))


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "returned NoneType without a loss"), (torch.zeros(()), "does not depend on any trained parameter")],
)
def test_a_step_without_a_loss_is_refused(value: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        trace_model(Stack(), torch.randn(6, 4), call=lambda batch: value)


def test_without_an_optimizer_adamw_is_assumed_and_noted() -> None:
    spec = trace_model(Stack(), torch.randn(6, 4))
    assert spec.optimizer.name == "AdamW"
    assert "no optimizer was given: AdamW's needs are assumed" in spec.notes


def test_a_loop_that_waits_for_a_value_is_refused() -> None:
    class Waiting(Stack):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            while loss.item() > 1e-3:
                loss = loss / 2
            return loss

    with pytest.raises(
        TraceError, match=r"values into Python \d+ times at \S*test_tracing.py:\d+: a loop that ends by"
    ):
        trace_model(Waiting(), torch.randn(6, 4), optimizer=torch.optim.SGD)


def test_layers_that_are_recomputed_by_operator_keep_what_products_return() -> None:
    spec = trace_model(Stack(), torch.randn(6, 4), optimizer=torch.optim.SGD)
    layer = spec.layers[0]
    assert layer.selective is not None
    # Both products, and the sum that the layer hands on; of the forward the ReLU is repeated.
    assert layer.selective.saved_bytes == 4 * (INNER + 2 * WIDTH) * MICROBATCH
    assert [(item.kind, item.calls) for item in layer.selective.work] == [("elementwise", 1)]
    found = spec.computing(StageMethod(checkpointing="selective"))
    assert found.layers[0].checkpointed_saved_bytes == layer.selective.saved_bytes
    assert found.layers[0].saved_bytes == layer.saved_bytes
    assert spec.computing(AS_IT_IS) is spec


def test_blocks_that_multiply_otherwise_when_repeated_are_not_recomputed_by_operator() -> None:
    class Forgetful(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() >= 0:
                with torch.no_grad():
                    self.seen = x @ x.T
            return super().forward(x)

    spec = trace_model(Stack(block=Forgetful), torch.randn(6, 4), optimizer=torch.optim.SGD)
    assert not spec.module_map.excludes("checkpointing")
    (reason,) = spec.module_map.excludes("selective_checkpointing")
    assert reason.startswith("some operators of a block cannot be run a second time: TraceError: ")
    with pytest.raises(PlanError, match=r"^checkpointing = 'selective': what that costs is not known"):
        spec.computing(StageMethod(checkpointing="selective"))


TOKENS = torch.zeros(4, 100, dtype=torch.int64)
IMAGES = torch.zeros(3, 1, 2, 2)
HUGE = torch.zeros(8, 1 << 20)
RAGGED = (torch.zeros(3, 2), torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("batch", "powers"),
    [
        (TOKENS, [BILINEAR, QUADRATIC, CONSTANT]),
        (TOKENS[:, :3], [QUADRATIC, CONSTANT]),  # too short to be thinned out twice
        (IMAGES, [QUADRATIC, CONSTANT]),
        (RAGGED, [CONSTANT]),
    ],
)
def test_the_most_general_sizes_come_first(batch, powers):
    assert [basis.powers for basis in bases(batch, real=False)] == powers


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("batch", [TOKENS, TOKENS[:1], TOKENS.repeat(1, 50), TOKENS[:, :4], IMAGES, HUGE])
def test_sizes_determine_what_is_fitted_and_check_it(batch, real):
    expression = {BILINEAR: 3 + b + 5 * s + 2 * b * s + s**2 + 7 * b * s**2, QUADRATIC: 3 + b + 5 * b**2}
    for basis in bases(batch, real=real):
        if basis.powers == CONSTANT:
            continue
        wanted = expression[basis.powers]
        counts = [int(wanted.subs({b: rows, s: length})) for rows, length in basis.sizes]
        assert sympy.expand(basis.fit(counts, "bytes") - wanted) == 0
        assert basis.check not in basis.points
        assert min(rows for rows, _ in basis.sizes) >= 2


def points(batch, real=False):
    return next(bases(batch, real=real)).points


def test_sizes_stay_small():
    long = TOKENS.repeat(1, 50)
    assert max(length for _, length in points(long)) == 512
    assert max(length for _, length in points(long, real=True)) == 64
    assert [rows for rows, _ in points(IMAGES)] == [3, 6, 9]
    assert [rows for rows, _ in points(HUGE)] == [rows for rows, _ in points(IMAGES, real=True)] == [2, 4, 6]


def test_batches_are_made_for_their_sizes():
    made = {basis.powers: sized(TOKENS, basis, basis.points[-1], None) for basis in bases(TOKENS, real=False)}
    assert made[BILINEAR].shape == (8, 25)
    assert made[QUADRATIC].shape == (12, 100)
    assert made[CONSTANT] is TOKENS


def test_the_user_s_own_way_to_resize_is_taken():
    for basis in bases(TOKENS, real=False):
        if basis.powers != CONSTANT:
            made = sized("batch", basis, (5, 7), lambda *args: args)
            assert made == ("batch", 5, 7 if basis.powers == BILINEAR else None)
