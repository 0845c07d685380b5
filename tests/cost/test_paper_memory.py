"""Mist's own memory rules reproduce the published peaks of their example: a test of our understanding, not our model.

The rules are those of the artifact's analyser (Dazz993/Mist, commit d69e530), for fp16 weights and gradients with
float32 optimizer states, layer norms, GELU and attention that keeps its scores. Everything is in bytes.
"""

from dataclasses import dataclass, replace

import pytest

MIB = 1 << 20
HALF, FULL, INDEX = 2, 4, 8


@dataclass(frozen=True, kw_only=True)
class Model:
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    length: int
    layers: int

    @property
    def matrices(self):
        """Parameters of a layer's four matrices."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn

    @property
    def layer(self):
        """All parameters of a layer: two norms have a weight and a bias."""
        return self.matrices + 4 * self.hidden

    @property
    def table(self):
        """The embedding, or the output layer."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage that has everything, under ZeRO-1."""

    microbatch: int
    data_parallel: int
    checkpointed: int
    in_flight_before: int = 0


def states(parameters, plan):
    """Weights and gradients whole; masters and two moments shared out."""
    return 2 * HALF * parameters + 3 * FULL * parameters / plan.data_parallel


def forward_states(model, plan):
    """One layer's optimizer states lie in the buffers that all layers are stepped in, which have no norms."""
    working = 3 * FULL * model.matrices / plan.data_parallel
    rest = (model.layers - 1) * 3 * FULL * model.layer / plan.data_parallel
    return working + rest + model.layers * 2 * HALF * model.layer


def tokens(model, plan):
    return plan.microbatch * model.length


def activation(model, plan):
    """A layer's input or output."""
    return HALF * tokens(model, plan) * model.hidden


def scores(model, plan):
    """Attention scores of a layer."""
    return HALF * plan.microbatch * model.heads * model.length**2


def full_layer(model, plan):
    """What a layer keeps: its input, both norms' results, query, key and value, probabilities, attention, sum, MLP."""
    wide = 2 * HALF * tokens(model, plan) * model.ffn
    return 8 * activation(model, plan) + scores(model, plan) + wide + statistics(model, plan)


def statistics(model, plan):
    """Mean and deviation of every row, of two norms."""
    return 4 * FULL * tokens(model, plan)


def backward_peak(model, plan):
    """In the softmax: input, first norm, query, key; the residual's and value's gradients; three times scores."""
    return 6 * activation(model, plan) + 3 * scores(model, plan) + statistics(model, plan)


def loss_peak(model, plan):
    """The output layer's input, the logits twice; per token the maximum, its place, a mask and two indices."""
    logits = HALF * tokens(model, plan) * model.vocabulary
    return activation(model, plan) + 2 * logits + tokens(model, plan) * (HALF + 3 * INDEX + 1)


def saved(model, plan, *, current):
    """Kept activations of this microbatch in ``current`` layers of which all may be recomputed, and of those before."""
    recomputed, kept = activation(model, plan), full_layer(model, plan)
    others = max(0, current - plan.checkpointed)
    here = min(current, plan.checkpointed) * recomputed + others * kept
    before = plan.checkpointed * recomputed + (model.layers - plan.checkpointed) * kept
    return here + plan.in_flight_before * before


def forward(model, plan):
    ends = 2 * states(model.table, plan)
    return (
        forward_states(model, plan)
        + ends
        + saved(model, plan, current=model.layers)
        + scores(model, plan)  # the buffer that all layers share
        + loss_peak(model, plan)
    )


def backward(model, plan):
    ends = 2 * states(model.table, plan)
    return (
        model.layers * states(model.layer, plan)
        + ends
        + saved(model, plan, current=model.layers - 1)
        + scores(model, plan)
        + activation(model, plan)  # the output
        + backward_peak(model, plan)
    )


GPT = Model(hidden=2048, ffn=8192, heads=16, vocabulary=50304, length=2048, layers=24)
EXAMPLE = Plan(microbatch=8, data_parallel=2, checkpointed=24)


def test_the_published_peaks():
    assert forward(GPT, EXAMPLE) / MIB == 19255.25
    assert backward(GPT, EXAMPLE) / MIB == 19503.125


def test_their_terms():
    terms = {
        "layers, forward": (forward_states(GPT, EXAMPLE), 11521.828125),
        "layers, backward": (GPT.layers * states(GPT.layer, EXAMPLE), 11521.875),
        "embedding or output layer": (states(GPT.table, EXAMPLE), 982.5),
        "inputs of 24 layers": (saved(GPT, EXAMPLE, current=24), 1536),
        "inputs of 23 layers": (saved(GPT, EXAMPLE, current=23), 1472),
        "attention buffer": (scores(GPT, EXAMPLE), 1024),
        "output": (activation(GPT, EXAMPLE), 64),
        "backward of a layer": (backward_peak(GPT, EXAMPLE), 3456.25),
        "loss": (loss_peak(GPT, EXAMPLE), 3208.421875),
    }
    assert {name: value / MIB for name, (value, _) in terms.items()} == {
        name: truth for name, (_, truth) in terms.items()
    }
    assert GPT.layer == 50339840
    assert GPT.table == 103022592


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_activations_follow_the_microbatch_and_states_do_not(microbatch):
    plan = replace(EXAMPLE, microbatch=microbatch)
    kept = GPT.layers * states(GPT.layer, EXAMPLE) + 2 * states(GPT.table, EXAMPLE)
    assert (backward(GPT, plan) - kept) * 8 / microbatch == backward(GPT, EXAMPLE) - kept


def test_states_of_one_device_alone_are_16_bytes_a_parameter():
    assert states(GPT.layer, replace(EXAMPLE, data_parallel=1)) == 16 * GPT.layer


def test_layers_that_are_not_recomputed_keep_everything():
    plan = replace(EXAMPLE, checkpointed=0)
    assert saved(GPT, plan, current=24) == 24 * full_layer(GPT, EXAMPLE)
    before = replace(plan, in_flight_before=2)
    assert saved(GPT, before, current=24) == 72 * full_layer(GPT, EXAMPLE)
