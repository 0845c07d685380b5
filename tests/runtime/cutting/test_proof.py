import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.errors import TraceError
from lightning_mist.runtime.cutting import follow, proof
from lightning_mist.runtime.cutting.follow import Result
from lightning_mist.runtime.cutting.proof import prove
from tests import zoo
from tests.runtime.cutting.networks import (
    EXACT,
    JOINT,
    LATER,
    MIXED,
    TERMS,
    Network,
    changed,
    left_out,
    make_batch,
    repeated,
    rules_of,
    run_in_parts,
    size,
    whole_run,
)

_PROVED = {}


def proved(name):
    """A network, and its rules from a batch without any padding."""
    if name not in _PROVED:
        net = Network(EXACT[name])
        _PROVED[name] = net, rules_of(net, make_batch(6, padding=False))
    return _PROVED[name]


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_the_whole_for_any_padding_though_the_first_batch_had_none(name, data):
    net, rules = proved(name)
    assert not isinstance(rules, str), rules
    rows = data.draw(st.integers(2, 7))
    ends = sorted({*data.draw(st.lists(st.integers(1, rows - 1), min_size=1, max_size=3)), rows})
    batch = make_batch(rows, seed=data.draw(st.integers(0, 1000)))
    loss, wanted = whole_run(net, batch)
    found, given_gradients = run_in_parts(net, rules, batch, ends)
    assert found == pytest.approx(loss, rel=1e-12)
    for one, other in zip(given_gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class Behind(zoo.Plain):
    """What runs behind the layers drops something, or takes what they have made of rows that lie one in another."""

    def __init__(self, kind, rate=0.5):
        super().__init__()
        self.kind, self.drop = kind, torch.nn.Dropout(rate)

    def training_step(self, batch, batch_idx):
        h = self.first(batch["x"])
        if self.kind == "crossed":
            h = torch.stack([h, 2 * h]).flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        if self.kind == "crossed":
            h = h.unflatten(0, (2, -1)).sum(0)
        if self.kind == "attends":
            h = h + torch.nn.functional.scaled_dot_product_attention(*[h[:, None]] * 3, dropout_p=0.5)[:, 0]
        return self.loss(self.drop(h) if self.kind == "drops" else h, batch)


def test_it_is_known_whether_what_runs_behind_the_layers_may_take_some_rows_after_others():
    for net, reason in ((Behind(""), ""), (Behind("drops", 0.0), ""), (Behind("drops"), "drops something at random"),
                        (Behind("attends"), "drops something at random"),
                        (Behind("crossed"), "of all rows together")):  # fmt: skip
        torch.manual_seed(0)
        batch, blocks = zoo.xy_batch(6), [f"blocks.{index}" for index in range(len(net.blocks))]
        found = prove(net.double(), blocks, lambda item, net=net: (net.training_step(item, 0), []),
                      {"x": batch["x"].double(), "y": batch["y"]})  # fmt: skip
        assert not isinstance(found, str), found
        assert reason in found.whole_tail
        assert bool(reason) == bool(found.whole_tail)


@pytest.mark.parametrize("name", JOINT)
def test_losses_that_depend_on_rows_together_are_not_cut(name):
    net = Network(JOINT[name])
    state, before = torch.get_rng_state(), [p.clone() for p in net.parameters()]
    reason = rules_of(net, make_batch(6, padding=False))
    assert isinstance(reason, str)
    assert "networks.py:" in reason
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def weighed(form):
    """Networks with a term that weighs nothing, little, or much, and their rules, in double and single precision."""
    for dtype in (torch.float64, torch.float32):
        for weight in (0.0, 1e-9, 1e-4, 1.0):
            net, batch = Network(form).to(dtype).weigh(weight), make_batch(6, padding=False)
            yield net, rules_of(net, {**batch, "flag": batch["flag"].to(dtype)}), dtype


def assert_parts_add_up(net, rules, dtype):
    """For a batch with flags and several kinds, which the one that was looked at did not have."""
    batch = make_batch(6, seed=7, padding=False)
    batch["flag"] = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).roll(2).to(dtype)
    batch["kind"] = torch.tensor([1, 0, 1, 0, 1, 0])
    (wanted, gradients), (found, others) = whole_run(net, batch), run_in_parts(net, rules, batch, [1, 3, 6])
    limit = 1e-10 if dtype == torch.float64 else 1e-5
    assert found == pytest.approx(wanted, rel=limit)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=limit * largest)


@pytest.mark.parametrize("name", TERMS)
def test_terms_count_as_what_they_are_whatever_they_weigh_at_first(name):
    for net, rules, dtype in weighed(TERMS[name]):
        assert not isinstance(rules, str), rules
        assert_parts_add_up(net.weigh(1.0), rules, dtype)


@pytest.mark.parametrize("name", MIXED)
def test_terms_that_go_by_rows_together_keep_batches_whole_whatever_they_weigh(name):
    for _, rules, _ in weighed(MIXED[name]):
        assert isinstance(rules, str)
        assert "networks.py:" in rules


@pytest.mark.parametrize("form", LATER)
def test_what_is_put_together_otherwise_later_ends_training(form):
    net = Network(form).weigh(0.0)
    rules = rules_of(net, make_batch(6))
    assert_parts_add_up(net, rules, torch.float64)
    with pytest.raises(TraceError, match=r"the loss is made otherwise .*(networks\.py:|is max)"):
        assert_parts_add_up(net.weigh(1.0), rules, torch.float64)


def fewer_rows_in(net, hidden, batch):
    return size(net.words(net.embed(batch["x"][: net.rows]))).mean()


def fewer_rows_out(net, hidden, batch):
    return size(hidden[0 : net.rows]).mean()


def fewer_rows_looked_at(net, hidden, batch):
    net.seen = batch["x"][: net.rows].sum(), hidden[:2]
    return size(hidden).mean()


@pytest.mark.parametrize("form", [fewer_rows_in, fewer_rows_out])
@pytest.mark.parametrize(("first", "later"), [(6, 4), (4, 4), (100, 5)])
def test_rows_that_are_left_out_end_training_where_parts_keep_them(form, first, later):
    """Parts have 1, 2 and 3 rows of 6; the proof looks at 5."""
    net = Network(form).weigh(0.0)
    net.rows = first
    rules = rules_of(net, make_batch(6 if first != later else 4))
    net.rows = later
    with pytest.raises(TraceError, match=r"the loss is made of some of the batch's rows \(rows 0 to \d at .*\.py:"):
        assert_parts_add_up(net, rules, torch.float64)


def rows_counted(net, hidden, batch):
    rows = len(batch["x"])
    return size(hidden[: batch["x"].shape[0]]).mean() + net.words(net.embed(batch["x"][:rows])).mean()


@pytest.mark.parametrize("form", [fewer_rows_looked_at, rows_counted])
def test_rows_may_be_left_out_of_what_is_only_looked_at_and_sliced_by_their_number(form):
    net = Network(form).weigh(0.0)
    net.rows = 6
    rules = rules_of(net, make_batch(6))
    for net.rows in (6, 3):
        assert_parts_add_up(net, rules, torch.float64)


@pytest.mark.parametrize("form", [left_out, repeated, changed])
def test_what_is_left_out_or_changed_by_rows_later_does_not(form):
    net = Network(form).weigh(0.0)
    rules = rules_of(net, make_batch(6))
    for weight in (0.0, 1.0):
        assert_parts_add_up(net.weigh(weight), rules, torch.float64)


def test_the_step_is_called_twice():
    net, calls = Network(EXACT["two terms"]), []
    rules = prove(net, ("blocks.0",), lambda batch: (calls.append(len(batch["x"])), (net(batch), []))[1], make_batch(8))
    assert not isinstance(rules, str)
    assert calls == [5, 2]
    assert len(rules.slice.entries) <= 4


@pytest.mark.parametrize("calls", [0, 40, 400])
def test_running_out_of_memory_is_no_answer(monkeypatch, calls):
    """Neither that batches cannot be cut, nor that a variant of the batch does not run: it is tried again with less."""
    left, run_entry = [calls], follow.run_entry

    def run(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("2 GiB")
        return run_entry(*args, **kwargs)

    for module in (proof, follow):
        monkeypatch.setattr(module, "run_entry", run)
    with pytest.raises(torch.OutOfMemoryError):
        rules_of(Network(EXACT["two terms"]), make_batch(6, padding=False))


@pytest.mark.sample
@pytest.mark.parametrize("name", ["nano_dropout", "vit", "sequence_first", "gpt2", "t5", "custom_function"])
def test_ordinary_models_are_cut(name):
    module, make = zoo.make(name)
    batch = make(4)
    rules = prove(module, (), lambda item: (zoo.step(module)(item), []), batch)
    assert not isinstance(rules, str), rules


@pytest.mark.parametrize("name", ["batch_norm", "contrastive", "token_mean", "noise"])
def test_other_models_are_not(name):
    module, make = zoo.make(name)
    assert isinstance(prove(module, (), lambda item: (zoo.step(module)(item), []), make(4)), str)


def test_dropout_in_torch_layers_does_not_count():
    class Layers(zoo.Plain):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.GRU(zoo.WIDTH, zoo.WIDTH, num_layers=2, dropout=0.5, batch_first=True)
            self.encoder = torch.nn.TransformerEncoderLayer(zoo.WIDTH, 2, 32, dropout=0.5, batch_first=True)

        def training_step(self, batch, batch_idx):
            h = self.first(batch["x"]).unsqueeze(1).expand(-1, 3, -1)
            return self.loss(self.encoder(self.rnn(h)[0]).mean(1), batch)

    module = Layers()
    rules = prove(module, (), lambda item: (zoo.step(module)(item), []), zoo.xy_batch(4))
    assert not isinstance(rules, str), rules
    assert module.rnn.dropout == 0.5


def test_batches_without_enough_rows():
    net = Network(EXACT["labels"])
    for batch in (make_batch(1), {"n": 1}):
        assert rules_of(net, batch).startswith("the batch cannot be cut")


def test_a_step_without_loss():
    net = Network(lambda n, h, b: None)
    with pytest.raises(TraceError, match="without a loss"):
        rules_of(net, make_batch(4))


def test_sixteen_bit_arithmetic_is_compared_coarsely():
    module, make = zoo.make("nano")

    def step(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.training_step(batch, 0), []

    assert not isinstance(prove(module, (), step, make(4)), str)


def test_numbers_from_python_are_refused():
    net = Network(lambda n, h, b: h.square().mean() * random.random())
    assert "from Python or numpy" in rules_of(net, make_batch(4))


def test_a_layer_that_is_dropped_with_a_probability_of_zero_is_not_random():
    def form(rate):
        return lambda n, h, b: (h if torch.rand([]) < rate else 2 * h).square().mean()

    assert not isinstance(rules_of(Network(form(0.0)), make_batch(4)), str)
    assert "random numbers other than dropout" in rules_of(Network(form(0.1)), make_batch(4))


def ways_of(make):
    """How the results of a step follow from those of parts; ``make`` gives them by name."""
    net = Network(lambda n, h, b: h)

    def step(batch):
        hidden = net(batch)
        return hidden.square().mean(), [Result(key=("extra", k), value=v) for k, v in make(net, hidden, batch).items()]

    rules = prove(net, ("blocks.0",), step, make_batch(6))
    return rules if isinstance(rules, str) else {key[1]: way for key, way in rules.results.items() if len(key) > 1}


def test_results_follow_as_means_sums_extremes_rows_or_not_at_all():
    assert ways_of(
        lambda net, h, b: {
            "mean": h.mean(),
            "sum": h.sum().item(),
            "largest": h.max(),
            "rows": h.mean((1, 2)),
            "n": len(h),
            "counted": int(b["mask"].sum()),
            "text": "x",
            "names": ["a"] * len(h),
            "constant": net.pair.bias.sum(),
            "right": (h.argmax(-1) == b["y"])[b["mask"].bool()].double().mean(),
        }
    ) == {
        "mean": "mean",
        "sum": "sum",
        "largest": "max",
        "rows": "rows 0 1",
        "n": "sum",
        "counted": "sum",
        "text": "same",
        "names": "list",
        "constant": "same",
        "right": "sum",
    }


@pytest.mark.parametrize(
    "make",
    [
        *(lambda h: h.mean().exp(), lambda h: len(h) ** 2, lambda h: {len(h): 1}, lambda h: h.mean().item() ** 2),
        *(lambda h: h.square().mean().abs(), lambda h: h.square().mean().item() + h.square().sum().item() * 1e-12),
    ],
)
def test_results_that_do_not_follow_are_named(make):
    assert "'r' of what training_step returns cannot be put together" in ways_of(lambda net, h, b: {"r": make(h)})


@pytest.mark.parametrize("take", [float, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, "{}".format])
def test_numbers_for_something_else_are_named(take):
    seen = []
    answer = ways_of(lambda net, h, b: seen.append(take(h.mean().detach())) or {})
    assert "the step takes numbers for something beside its results" in answer


@pytest.mark.parametrize(
    ("drop", "has_dropout"),
    [
        (lambda h: torch.nn.functional.dropout(h, 0.5), True),
        (lambda h: torch.nn.functional.dropout(h, 0.0), False),
        (lambda h: torch.nn.functional.dropout(h, 0.5, training=False), False),
        (torch.nn.Dropout(0.5), True),
        (torch.nn.Dropout(0.5).eval(), False),
        (lambda h: torch.nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=0.5), True),
        (lambda h: torch.nn.functional.scaled_dot_product_attention(h, h, h), False),
    ],
)
def test_it_is_known_whether_parts_draw_other_masks(drop, has_dropout):
    net = Network(next(iter(EXACT.values())))
    rules = prove(net, ("blocks.0",), lambda batch: (drop(net.embed(batch["x"])).square().mean(), []), make_batch(6))
    assert rules.has_dropout is has_dropout


def test_numbers_that_are_results_or_computed_with_are_not():
    assert ways_of(lambda net, h, b: {"r": float(h.sum().detach())}) == {"r": "sum"}
    assert ways_of(lambda net, h, b: {"r": h.sum() * (net.pair.bias.sum().item() + 1.0)}) == {"r": "sum"}
