from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mist.errors import PlanError
from lightning_mist.model import find_blocks, map_module
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from lightning_mist.model.split.split_check import call_blocks, numbers
from lightning_mist.model.split.splits import TokenTable, derive_contexts, derive_splits, find_tables, prepare_glue
from lightning_mist.plan import Exclusion
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.tensors import slice_rows
from tests import zoo
from tests.traps.context import Decoder, NextToken, Summed, of
from tests.traps.project import loader

EVEN = zoo.EVEN


def calls_of(module, batch):
    names = find_blocks(module)
    return call_blocks(module, zoo.step(module), batch, names), names


def tables(module, batch, *, answer=True):
    calls, names = calls_of(module, batch)
    return find_tables(module, zoo.step(module), calls, names, answer=answer)


def test_a_table_that_is_looked_up_in_and_makes_logits_is_found_once():
    (table,) = tables(zoo.Nano(), zoo.pair_batch(4))
    assert table == TokenTable(name="transformer.wte.weight", dim=0, rows=97, bias=None)


def test_an_embedding_with_as_many_rows_as_the_logits_goes_with_them():
    found = tables(zoo.Encoder(), zoo.token_batch(4))
    assert found == (
        TokenTable(name="head.weight", dim=0, rows=97, bias="head.bias"),
        TokenTable(name="embedding.weight", dim=0, rows=97, bias=None),
    )
    assert found[0].splits() == (
        ParameterSplit(name="head.weight", dim=0, factors=((97, True),)),
        ParameterSplit(name="head.bias", dim=0, factors=((97, True),)),
    )


def test_a_few_classes_are_no_table():
    assert tables(zoo.Plain(), zoo.xy_batch(4)) == ()


def test_logits_that_no_cross_entropy_sees_are_no_table():
    class Squared(zoo.Nano):
        def forward(self, index, targets):
            x = self.transformer.wte(index)
            for block in self.transformer.h:
                x = block(x)
            return self.lm_head(x).pow(2).mean()

    assert tables(Squared(), zoo.pair_batch(4)) == ()


def test_only_the_last_product_before_the_loss_counts():
    class Deep(zoo.Nano):
        def __init__(self):
            super().__init__(tied=False)
            self.first = torch.nn.Linear(32, 128)
            self.lm_head = torch.nn.Linear(128, zoo.VOCABULARY)

        def forward(self, index, targets):
            x = self.transformer.wte(index)
            for block in self.transformer.h:
                x = block(x)
            logits = F.log_softmax(self.lm_head(torch.tanh(self.first(x))), -1)
            return F.nll_loss(logits.flatten(0, 1), targets.flatten())

    class Wide(Deep):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(128, 256)
            self.transformer.wte = torch.nn.Embedding(256, 32)

    assert {table.name for table in tables(Wide(), zoo.pair_batch(4))} == {
        "lm_head.weight",
        "transformer.wte.weight",
    }
    assert tables(Deep(), zoo.pair_batch(4)) == ()  # 97 rows of 128


@pytest.fixture
def nano():
    module = zoo.Nano(dropout=0.1, vocabulary=EVEN)
    return module, calls_of(module, zoo.pair_batch(4))


SPLIT = ParameterSplit(name="transformer.wte.weight", dim=0, factors=((EVEN, True),))
SEQUENCE = tuple(SequenceSplit(position=i, leaf=0, dim=1) for i in range(4))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("sequence", [(), SEQUENCE])
@pytest.mark.parametrize("answer", [True, False])
def test_head_and_tail_compute_the_same_over_ranks(nano, degree, sequence, answer, monkeypatch):
    made = []
    monkeypatch.setattr(
        "lightning_mist.model.split.splits.numbers",
        lambda *args, **kwargs: made.append(numbers(*args, **kwargs)) or made[0],
    )
    module, (calls, names) = nano
    check = prepare_glue(module, zoo.step(module), calls, names, torch.float64, answer=answer)
    assert (len(made[0]) > 4) is not answer
    outcome = check((SPLIT,), degree, sequence)
    assert outcome.reason is None
    # Blocks that run have whole weights here, so that attention needs whole sequences.
    assert outcome.gathered == ((("scaled_dot_product_attention", 4),) if sequence and not answer else ())
    assert type(module.lm_head.weight) is torch.nn.Parameter


def test_a_table_shared_out_in_the_wrong_order_is_found(nano, monkeypatch):
    module, (calls, names) = nano
    check = prepare_glue(module, zoo.step(module), calls, names, torch.float64, answer=True)
    monkeypatch.setattr(
        "lightning_mist.model.split.split_check.part_of",
        lambda full, split, rank, degree: full.chunk(degree)[degree - 1 - rank],
    )
    assert "differs by" in check((SPLIT,), 2, ()).reason


def test_an_error_of_the_step_itself_is_raised(nano):
    module, (calls, names) = nano

    def call(batch):
        raise RuntimeError("no such column")

    with pytest.raises(RuntimeError, match="no such column"):
        prepare_glue(module, call, calls, names, torch.float64, answer=True)


def derived(module, batch, degrees=(2, 4), blocks=None):
    call = zoo.step(module)
    found = map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3), blocks=blocks)
    return derive_splits(module, call, batch, found, degrees)


def of_zoo(name, degrees=(2, 4)):
    module, make_batch = zoo.make(name)
    return derived(module, make_batch(4), degrees)


def factors(found, degree):
    return {split.name: (split.dim, split.factors) for split in found.split(degree).parameters}


def whole_parameters(found, degree):
    return {use.name for use in found.parameters if found.split(degree).of(use.name) is None}


TRANSFORMERS = ("gpt2_even", "llama_even", "bert", "t5")


@pytest.mark.sample
@pytest.mark.parametrize("name", ["nano_even", "encoder", "demo", *TRANSFORMERS])
def test_models_that_can_be_shared_out_in_every_way(name, monkeypatch):
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    monkeypatch.setattr(zoo, "VOCABULARY", EVEN)
    found = of_zoo(name, (2,))
    assert found.excludes("tensor") == found.excludes("sequence") == ()
    # Norms, biases behind layers that are shared out along inputs, tables of positions, adapters' first halves.
    small = ("bias", "norm", "LayerNorm", "ln_", "wpe", "position", "token_type", "lora_A")
    left = [name for name in whole_parameters(found, 2) if not any(word in name for word in small)]
    assert left == (["model.cls.predictions.transform.dense.weight"] if name == "bert" else [])
    assert len(found.split(2).sequence) == len(found.blocks)
    assert {split.dim for split in found.split(2).sequence} == {1}


def test_gpt2_in_full():
    pytest.importorskip("transformers")
    found = of_zoo("gpt2_even", (2, 4))
    table, first = {}, "model.transformer.h.0."
    for name, split in factors(found, 4).items():
        if name.startswith(first) or ".h." not in name:
            table[name.removeprefix(first)] = split
    assert table == {
        "model.transformer.wte.weight": (0, ((EVEN, True),)),
        "attn.c_attn.weight": (1, ((3, False), (32, True))),
        "attn.c_attn.bias": (0, ((3, False), (32, True))),
        "attn.c_proj.weight": (0, ((32, True),)),
        "mlp.c_fc.weight": (1, ((128, True),)),
        "mlp.c_fc.bias": (0, ((128, True),)),
        "mlp.c_proj.weight": (0, ((128, True),)),
    }
    names = [use.name for use in found.parameters]
    order = [names.index(split.name) for split in found.split(2).parameters]
    assert order == sorted(order)
    assert [[live.sequence_dim for live in cut] for cut in found.cuts] == [[1], [1], [1]]


def test_heads_that_a_degree_does_not_divide_leave_attention_whole_and_are_named():
    pytest.importorskip("transformers")
    found = of_zoo("llama", (2, 4))
    assert "model.model.layers.0.self_attn.q_proj.weight" in factors(found, 2)
    assert "model.model.layers.0.self_attn.q_proj.weight" not in factors(found, 4)
    assert factors(found, 4)["model.model.layers.3.mlp.up_proj.weight"] == (0, ((64, True),))
    notes = found.split(4).notes
    assert any("self_attn.o_proj.weight and what feeds it stay whole" in n and "2 groups" in n for n in notes)
    assert any("lm_head.weight stays whole: it has 97 rows, which 4 does not divide" in note for note in notes)


def test_adapters_of_frozen_layers():
    pytest.importorskip("transformers")
    found, layer = of_zoo("lora_llama", (2,)), "model.model.layers.0.self_attn."
    table = factors(found, 2)
    assert table[f"{layer}q_proj.base.weight"] == table[f"{layer}q_proj.lora_B.weight"] == (0, ((32, True),))
    assert f"{layer}q_proj.lora_A.weight" not in table
    assert table[f"{layer}o_proj.weight"] == (1, ((32, True),))


def test_a_length_that_a_degree_does_not_divide_excludes_parts_of_sequences():
    pytest.importorskip("transformers")
    found = of_zoo("vit", (2,))
    assert found.excludes("tensor") == ()
    assert found.split(2).sequence == ()
    assert found.excludes("sequence") == ("ViTLayer: the sequence has 17 positions, which 2 does not divide",)
    assert any(note.startswith("without sequence parallelism: ") for note in found.split(2).notes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plain", "no two linear layers with only elementwise work or attention heads between them were found"),
        ("closure", "OuterGate stays whole: it cannot be run by itself on the CPU: KeyError"),
        ("no_blocks", "no repeated blocks were found"),
        ("stray", "through a reference outside its module"),
        ("batch_norm", "running statistics"),
    ],
)
def test_modules_that_cannot_be_shared_out_say_why(name, reason):
    found = of_zoo(name)
    assert found.splits == ()
    assert any(reason in text for text in found.excludes("tensor"))


def test_a_degree_that_divides_nothing_is_refused_with_the_numbers():
    found = of_zoo("nano", (2, 3, 5))
    assert [split.degree for split in found.splits] == [2]
    reasons = dict(found.unsplit)
    assert set(reasons) == {3, 5}
    assert "4 groups (heads, for example), which 3 does not divide" in reasons[3]


class Wide(nn.Module):
    """A block of two layers, with a way for subclasses to spoil it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, 64), nn.Linear(64, zoo.WIDTH)
        self.more, self.back = nn.Linear(zoo.WIDTH, 32), nn.Linear(32, zoo.WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.down(self.between(F.gelu(self.up(F.layer_norm(h, h.shape[-1:])))))
        return h + self.back(torch.tanh(self.more(F.layer_norm(h, h.shape[-1:]))))

    def between(self, y: Tensor) -> Tensor:
        return y


class Blocks(zoo.Plain):
    def __init__(self, block: type[nn.Module] = Wide) -> None:
        self.kind = [block]
        super().__init__(3)

    def block(self) -> nn.Module:
        return self.kind[0]()


def test_what_does_not_compute_the_same_stays_whole_and_the_rest_is_shared_out():
    class Spoilt(Wide):
        def between(self, y: Tensor) -> Tensor:
            return y if type(y) is Tensor else y * 1.001

    found = derived(Blocks(Spoilt), zoo.xy_batch(4), (2,))
    assert set(factors(found, 2)) == {
        f"blocks.{i}.{name}" for i in range(3) for name in ("more.weight", "more.bias", "back.weight")
    }
    assert any(
        "Spoilt: down.weight and what feeds it stay whole: shared out over 2 ranks it is not the same: " in note
        for note in found.split(2).notes
    )


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_a_custom_function_is_right_and_said_to_be_slow():
    class Custom(Wide):
        def between(self, y: Tensor) -> Tensor:
            return Cubed.apply(y)

    found = derived(Blocks(Custom), zoo.xy_batch(4), (2,))
    assert "blocks.0.up.weight" in factors(found, 2)
    assert any("Custom puts parts together for " in note for note in found.split(2).notes)


def test_a_parameter_that_others_use_too_stays_whole():
    class Borrowing(Blocks):
        def loss(self, h, batch):
            return super().loss(h, batch) + self.borrowed.sum()

        def __init__(self) -> None:
            super().__init__()
            self.borrowed = self.blocks[1].up.weight

    found = derived(Borrowing(), zoo.xy_batch(4), (2,))
    assert {name.rpartition(".")[0] for name in factors(found, 2)} == {
        f"blocks.{i}.{name}" for i in range(3) for name in ("more", "back")
    }
    assert any("others use its parameters too" in note for note in found.split(2).notes)


def test_a_table_that_does_not_compute_the_same_stays_whole():
    class Spoilt(zoo.Nano):
        def forward(self, index, targets):
            loss = super().forward(index, targets)
            return loss if type(self.lm_head.weight) in (Tensor, nn.Parameter) else loss * 1.001

    found = derived(Spoilt(vocabulary=EVEN), zoo.pair_batch(4), (2,))
    assert "transformer.wte.weight" not in factors(found, 2)
    assert any("transformer.wte.weight stay whole: shared out over 2 ranks" in note for note in found.split(2).notes)


def test_a_model_without_values_is_checked_with_random_ones():
    shape = LanguageModelShape(
        hidden=64, ffn=128, layers=3, heads=4, vocabulary=EVEN, feed_forward="swiglu", rotary_fraction=0.5
    )
    module = hollow(lambda: LanguageModel(shape, 48))
    batch = (torch.zeros(4, 48, dtype=torch.long), torch.zeros(4, 48, dtype=torch.long))
    found = derived(module, batch, (2, 4))
    assert whole_parameters(found, 4) == {use.name for use in found.parameters if "norm" in use.name}
    assert factors(found, 4)["blocks.0.attention.query_key_value.weight"] == (0, ((3, False), (64, True)))
    assert len(found.split(4).sequence) == 3
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in module.parameters())


def test_what_does_not_fit_into_memory_is_not_guessed(monkeypatch):
    monkeypatch.setattr("lightning_mist.model.split.block_splits.MOST_BYTES", 1000)
    found = of_zoo("nano", (2,))
    (reason,) = found.excludes("tensor")
    assert "it could not be checked: its parameters besides matrices" in reason
    assert reason.endswith("in a check, which may take 1000 B")


def test_the_module_and_its_random_numbers_are_left_as_they_were():
    module, make_batch = zoo.make("nano_dropout")
    batch, state = make_batch(4), torch.get_rng_state()
    before = {name: (parameter, parameter.clone()) for name, parameter in module.named_parameters()}
    derived(module, batch, (2,))
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


def test_nothing_is_done_where_nothing_is_asked_or_possible():
    module, make_batch = zoo.make("nano")
    batch, call = make_batch(4), zoo.step(module)
    found = map_module(module, call, batch)
    assert derive_splits(module, call, batch, found, (1,)) is found
    ruled_out = replace(found, exclusions=(Exclusion(feature="tensor", reason="so"),))
    assert derive_splits(module, call, batch, ruled_out, (2,)) is ruled_out


def test_the_same_is_found_every_time():
    assert of_zoo("nano") == of_zoo("nano")


def test_the_whole_step_is_checked_where_blocks_by_themselves_are_not_enough(monkeypatch):
    class Leaky(Blocks):
        """Reads what a block computed inside, in a way that takes parts for wholes."""

        def training_step(self, batch, batch_idx):
            seen = []
            handles = [block.up.register_forward_hook(lambda *call: seen.append(call[-1])) for block in self.blocks]
            loss = super().training_step(batch, batch_idx)
            for handle in handles:
                handle.remove()
            return loss + self.penalty(seen[0])

        def penalty(self, y):
            return y.square().mean()

    found = derived(Leaky(), zoo.xy_batch(4), (2,))
    assert found.leaking_blocks == (0,)
    assert "blocks.0.up.weight" in factors(found, 2)

    class Wrong(Leaky):
        def penalty(self, y):
            return super().penalty(y) * (1 if type(y) is Tensor else 2)

    (reason,) = derived(Wrong(), zoo.xy_batch(4), (2,)).excludes("tensor")
    assert reason.startswith("the whole step shared out over 2 ranks is not the same: the ")

    monkeypatch.setattr("lightning_mist.model.split.block_splits.MOST_BYTES", 4 * 8 * 4000)
    (reason,) = derived(Leaky(), zoo.xy_batch(4), (2,)).excludes("tensor")
    assert reason.startswith("values inside of blocks are read from outside, and the step as a whole: it could not be ")


def test_parts_of_sequences_go_where_only_they_fail():
    class Spoilt(zoo.Nano):
        def forward(self, index, targets):
            x = self.transformer.wte(index)
            for block in self.transformer.h:
                x = block(x)
                x = x if type(x) is Tensor else x * 1.001
            return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    found = derived(Spoilt(), zoo.pair_batch(4), (2,))
    assert "transformer.h.0.mlp.0.weight" in factors(found, 2)
    assert found.split(2).sequence == ()
    (reason,) = found.excludes("sequence")
    assert reason.startswith("head and tail are not the same with sequences in parts: the ")


def contexts_derived(module, call, batch, degrees):
    found = map_module(module, call, batch, second_batch=slice_rows(batch, 0, 3))
    return derive_contexts(module, call, batch, found, degrees)


def contexts_of_zoo(name, degrees=(2, 4)):
    module, make_batch = zoo.make(name)
    return contexts_derived(module, zoo.step(module), make_batch(4), degrees)


def of_trap(kind, degrees):
    module = kind()
    return contexts_derived(module, module.loss, next(iter(loader())), degrees)


def test_a_decoder_shares_rows_and_no_parameters():
    found = contexts_of_zoo("nano")
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
