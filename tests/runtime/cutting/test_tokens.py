"""What is behind the last layer on parts of the tokens."""

import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_mist.runtime.cutting.mode import CutMode, check_counts, cutting
from lightning_mist.runtime.cutting.proof import prove
from lightning_mist.tensors import sequence_length, slice_tokens
from tests.runtime.cutting.networks import EXACT, WIDTH, WORDS, Network, flat, gradients, make_batch


class Mixing(nn.Module):
    """A layer in which tokens meet."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.line(hidden.cumsum(1)).tanh()


class Tokens(Network):
    """``handed`` stands for what the last layer gives, of some tokens."""

    handed = None

    def __init__(self, form):
        super().__init__(form)
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Mixing()])
        self.double()

    def forward(self, batch):
        hidden = self.blocks[0](self.embed(self.inputs(batch))) if self.handed is None else self.handed
        return self.form(self, hidden, batch)

    def inputs(self, batch):
        return batch["x"][:, :-1] if self.form in SHORT.values() else batch["x"]


def shifted(net, hidden, batch):
    return net.words(hidden)[:, :-1].reshape(-1, WORDS), batch["y"][:, 1:].reshape(-1)


def padded(net, hidden, batch):
    """As ``ForCausalLMLoss`` of transformers."""
    labels = F.pad(batch["y"], (0, 1), value=-100)[..., 1:].contiguous()
    return net.words(hidden).float().double().view(-1, WORDS), labels.view(-1)


def softcapped(net, hidden, batch):
    logits = 5 * (net.words(hidden) / 5).tanh()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["y"][:, 1:].flatten())


def items(net, hidden, batch):
    count = (batch["y"][:, 1:] != -100).sum()
    return F.cross_entropy(*shifted(net, hidden, batch), reduction="sum") / count


def masked(net, hidden, batch):
    logits, labels = shifted(net, hidden, batch)
    losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    kept = (labels != -100).double()
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def z_loss(net, hidden, batch):
    logits, labels = shifted(net, hidden, batch)
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def z_loss_of_all(net, hidden, batch):
    logits = net.words(hidden)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["y"][:, 1:].flatten())
    return loss + 1e-9 * logits.logsumexp(-1).square().mean()


SHORT = {
    "loader's shift": lambda n, h, b: F.cross_entropy(n.words(h).flatten(0, 1), b["x"][:, 1:].flatten()),
}
ALIKE = {
    **{
        name: EXACT[name]
        for name in (
            "labels",
            "smoothed",
            "class weights",
            "logarithms",
            "mask",
            "selected",
            "number of items",
            "sum",
            "labels changed in place",
        )
    },
    "z": lambda n, h, b: F.cross_entropy(*flat(n, h, b)) + 1e-2 * n.words(h).logsumexp(-1).square().mean(),
    "weight decay": EXACT["weight decay"],
}
SHIFTED = {
    "shift": lambda n, h, b: F.cross_entropy(*shifted(n, h, b)),
    "pad and shift": lambda n, h, b: F.cross_entropy(*padded(n, h, b)),
    "pad and shift, items": lambda n, h, b: F.cross_entropy(*padded(n, h, b), reduction="sum") / 7.0,
    "smoothed": lambda n, h, b: F.cross_entropy(*padded(n, h, b), label_smoothing=0.1),
    "class weights": lambda n, h, b: F.cross_entropy(*shifted(n, h, b), weight=n.classes, label_smoothing=0.2),
    "softcapped": softcapped, "items": items, "masked": masked, "z": z_loss, **SHORT,
}  # fmt: skip
REFUSED = {
    "mean of selected": (EXACT["mean of selected"], "mean"),
    "z of all": (z_loss_of_all, "mean"),
    "square": (lambda n, h, b: F.cross_entropy(*shifted(n, h, b)) ** 2, "pow"),
    "pooled": (lambda n, h, b: F.cross_entropy(n.pair(h.mean(1)), b["z"]), "mean"),
    "last token": (lambda n, h, b: F.cross_entropy(n.pair(h[:, -1]), b["z"]), "cross_entropy"),
    "cut by a number": (
        lambda n, h, b: F.cross_entropy(n.words(h)[:, :400].flatten(0, 1), b["y"][:, :400].flatten()),
        "__getitem__ .* by a number",
    ),
    "chunks of its own": (
        lambda n, h, b: sum(
            F.cross_entropy(n.words(part).flatten(0, 1), labels.flatten())
            for part, labels in zip(h.split(400, 1), b["y"].split(400, 1), strict=True)
        ),
        "split .* by a number",
    ),
    "positions": (
        lambda n, h, b: (n.words(h).square().mean(-1) * (torch.arange(h.shape[1]) < 400)).mean(), "mul"
    ),
    "rolled": (
        lambda n, h, b: F.cross_entropy(n.words(h).flatten(0, 1), b["y"].roll(-1, 1).flatten()), "cross_entropy"
    ),
    "smooth in time": (lambda n, h, b: F.mse_loss(h[:, 1:], h[:, :-1]) + (h * h.cumsum(1)).mean(), "cumsum"),
}  # fmt: skip


def batch_of(rows, length, *, seed=0, padding=True):
    first, *others = [make_batch(rows, seed=seed + number, padding=padding) for number in range(3)]
    for name in ("x", "y", "mask"):
        first[name] = torch.cat([item[name] for item in (first, *others)], 1)[:, :length].clone()
    return first


def rules_of(net, batch):
    found = {}
    for lap in (0, 1):
        answer = prove(net, ("blocks.0",), lambda item: (net(item), []), batch, lap=lap)
        found[lap] = answer if isinstance(answer, str) else pickle.loads(pickle.dumps(answer)).bound_to(net)
        if not isinstance(answer, str):
            return found[lap]
    return found


def run_in_chunks(net, rules, batch, ends):
    """The loss and the gradients of a batch whose tail takes tokens in chunks that end there."""
    every = sequence_length(batch) - rules.lap
    rows, first, total = len(batch["x"]), 0, 0.0
    whole, hidden = rules.measure(batch, rows), net.blocks[0](net.embed(net.inputs(batch)))
    handed = hidden.detach().requires_grad_()
    for end in [*ends, every]:
        piece, share = slice_tokens(batch, first, end + rules.lap), (end - first) / every
        short = sequence_length(batch) - handed.shape[1]
        net.handed = handed.narrow(1, first, end - first + rules.lap - short)
        mode = CutMode(rules, whole, rules.measure(piece, rows), 0.0, share, rows=rows, batch=piece, own=rows)
        with cutting(mode):
            loss = net(piece)
        net.handed = None
        mode.expect(("loss",), loss, "the loss")
        check_counts(mode.wrong)
        loss = loss / share if rules.results["loss",] == "sum" else loss
        (loss * share).backward()
        total += loss.item() * share
        first = end
    hidden.backward(handed.grad)
    return total, gradients(net)


def ending(batch, kind):
    """Labels that count all in one chunk, or none in one."""
    if kind:
        batch["y"][:, slice(0, 8) if kind == "early" else slice(5, None)] = -100
    batch["mask"] = (batch["y"] != -100).long()
    return batch


@pytest.mark.parametrize(("name", "lap"), [*((n, 0) for n in ALIKE), *((n, 1) for n in SHIFTED)])
def test_chunks_of_tokens_add_up_to_the_whole(name, lap):
    net = Tokens((SHIFTED if lap else ALIKE)[name])
    for rows in (2, 1):
        rules = rules_of(net, batch_of(rows, 7, padding=False))
        assert not isinstance(rules, dict), rules
        assert rules.lap == lap
        for many, kind in ((rows, ""), (rows, "early"), (3 if rows > 1 else 1, "late")):
            batch = ending(batch_of(many, 13, seed=3), kind)
            batch["y"][-1, 3 if kind == "late" else 11] = 2
            loss = net(batch)
            loss.backward()
            wanted = gradients(net)
            found, others = run_in_chunks(net, rules, batch, [1, 5, 8])
            assert found == pytest.approx(loss.item(), rel=1e-12)
            for one, other in zip(others, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_at_tokens_together_is_not_cut(name):
    form, culprit = REFUSED[name]
    found = rules_of(Tokens(form), batch_of(2, 7, padding=False))
    assert isinstance(found, dict), found
    # With the next one's first token too, where labels are shifted.
    assert re.search(f"^the loss depends on tokens together: {culprit}", found[1]), found
    few = rules_of(Tokens(form), batch_of(2, 2, padding=False))
    assert "do not share a second dimension of at least 3 tokens" in few[1]


def test_truths_that_are_all_alike_lie_as_what_they_are_made_of():
    """No token is right, and few count, when the step is looked at."""

    def form(net, hidden, batch):
        logits, labels = flat(net, hidden, batch)
        right = (logits.argmax(-1) == labels) & (labels != -100)
        return F.cross_entropy(logits, labels) + 0.0 * right.sum() / (labels != -100).sum()

    batch, net = ending(batch_of(2, 7), "late"), Tokens(form)
    batch["y"][:, 1:] = -100
    batch["y"][:, 0] = (net.words(net.blocks[0](net.embed(batch["x"])))[:, 0].argmax(-1) + 1) % WORDS
    assert not isinstance(found := rules_of(net, batch), dict), found
