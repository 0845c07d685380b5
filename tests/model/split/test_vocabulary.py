import pytest
import torch
from torch.nn import functional as F

from lightning_mist.model import find_blocks
from lightning_mist.model.split.block_calls import call_blocks
from lightning_mist.model.split.vocabulary import Table, find_tables, prepare_glue
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from tests import zoo

EVEN = zoo.EVEN


def calls_of(module, batch):
    names = find_blocks(module)
    return call_blocks(module, zoo.step(module), batch, names), names


def tables(module, batch, *, answer=True):
    calls, names = calls_of(module, batch)
    return find_tables(module, zoo.step(module), calls, names, answer=answer)


def test_a_table_that_is_looked_up_in_and_makes_logits_is_found_once():
    (table,) = tables(zoo.Nano(), zoo.pair_batch(4))
    assert table == Table(name="transformer.wte.weight", dim=0, rows=97, bias=None)


def test_an_embedding_with_as_many_rows_as_the_logits_goes_with_them():
    found = tables(zoo.Encoder(), zoo.token_batch(4))
    assert found == (
        Table(name="head.weight", dim=0, rows=97, bias="head.bias"),
        Table(name="embedding.weight", dim=0, rows=97, bias=None),
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
def test_head_and_tail_compute_the_same_over_ranks(nano, degree, sequence, answer):
    module, (calls, names) = nano
    glue = prepare_glue(module, zoo.step(module), calls, names, torch.float64, answer=answer)
    assert glue.reference.tolerance == 1e-10
    assert (len(glue.values) > 4) is not answer
    outcome = glue.check((SPLIT,), degree, sequence)
    assert outcome.reason is None
    # Blocks that run have whole weights here, so that attention needs whole sequences.
    assert outcome.gathered == ((("scaled_dot_product_attention", 4),) if sequence and not answer else ())
    assert type(module.lm_head.weight) is torch.nn.Parameter


def test_a_table_shared_out_in_the_wrong_order_is_found(nano, monkeypatch):
    module, (calls, names) = nano
    glue = prepare_glue(module, zoo.step(module), calls, names, torch.float64, answer=True)
    monkeypatch.setattr(
        "lightning_mist.model.split.split_check.part_of",
        lambda full, split, rank, degree: full.chunk(degree)[degree - 1 - rank],
    )
    assert "differs by" in glue.check((SPLIT,), 2, ()).reason


def test_an_error_of_the_step_itself_is_raised(nano):
    module, (calls, names) = nano

    def call(batch):
        raise RuntimeError("no such column")

    with pytest.raises(RuntimeError, match="no such column"):
        prepare_glue(module, call, calls, names, torch.float64, answer=True)
