"""A small network, losses of many forms over its batches, and ways to run them whole and in parts."""

import pickle

import torch
import torch.nn.functional as F
from torch import nn

from lightning_mist.runtime.cutting.mode import CutMode, check_counts, cutting
from lightning_mist.runtime.cutting.proof import prove
from lightning_mist.runtime.cutting.rules import CutRules

WORDS, WIDTH, LENGTH = 11, 8, 5


class Network(nn.Module):
    """One block between an embedding and two heads; ``form`` makes its loss of hidden states and the batch."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.words, self.pair = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.register_buffer("classes", torch.linspace(0.5, 2.0, WORDS))
        self.register_buffer("scale", torch.ones(()))
        self.form, self.weight = form, 1.0
        self.double()

    def weigh(self, weight):
        """Give the second term of the loss a weight, as a schedule does."""
        self.weight = weight
        self.scale.fill_(weight)
        return self

    def forward(self, batch):
        return self.form(self, self.blocks[0](self.embed(batch["x"])), batch)


def make_batch(rows, *, seed=0, padding=True):
    """Tokens, labels, a class, a weight and a mask per row; one row counts nothing if there is padding."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    weights = torch.ones(rows, dtype=torch.float64)
    if padding:
        for row in range(rows):
            labels[row, int(torch.randint(0, LENGTH, (), generator=generator)) :] = -100
        labels[0], labels[-1, 0] = -100, 1
        weights = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.1
    return {
        "x": torch.randint(0, WORDS, (rows, LENGTH), generator=generator),
        "y": labels,
        "z": torch.randint(0, 2, (rows,), generator=generator),
        "w": weights,
        "mask": (labels != -100).long(),
        "flag": torch.zeros(rows, dtype=torch.float64),
        "kind": torch.zeros(rows, dtype=torch.long),
    }


def flat(net, hidden, batch):
    return net.words(hidden).flatten(0, 1), batch["y"].flatten()


def each(net, hidden, batch):
    logits, labels = flat(net, hidden, batch)
    return F.cross_entropy(logits, labels.clamp(min=0), reduction="none").view_as(batch["y"])


def two_terms(net, hidden, batch):
    mask = batch["mask"].unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
    return F.cross_entropy(*flat(net, hidden, batch)) + F.cross_entropy(net.pair(pooled), batch["z"])


def number_of_items(net, hidden, batch):
    items = float((batch["y"] != -100).sum())
    return F.cross_entropy(*flat(net, hidden, batch), reduction="sum") / max(items, 1)


def selected(net, hidden, batch):
    kept = batch["y"] != -100
    return F.cross_entropy(net.words(hidden)[kept], batch["y"][kept])


def weight_decay(net, hidden, batch):
    return F.cross_entropy(*flat(net, hidden, batch)) + 1e-2 * sum(p.square().sum() for p in net.parameters())


def in_place(net, hidden, batch):
    labels = batch["y"].clone()
    labels[labels == 3] = -100
    return F.cross_entropy(net.words(hidden).view(-1, WORDS), labels.view(-1))


class Reversed(torch.autograd.Function):
    """A custom function: its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


def mask_of_lengths(net, hidden, batch):
    lengths = batch["mask"].sum(1)
    kept = torch.arange(hidden.shape[1])[None] < lengths[:, None]
    return (each(net, hidden, batch) * kept).sum() / kept.sum()


EXACT = {
    "labels": lambda n, h, b: F.cross_entropy(*flat(n, h, b)),
    "other ignored label": lambda n, h, b: F.cross_entropy(*flat(n, h, b), ignore_index=-100) * 2,
    "smoothed": lambda n, h, b: F.cross_entropy(*flat(n, h, b), label_smoothing=0.1),
    "class weights": lambda n, h, b: F.cross_entropy(*flat(n, h, b), weight=n.classes, label_smoothing=0.2),
    "logarithms": lambda n, h, b: F.nll_loss(F.log_softmax(flat(n, h, b)[0], -1), b["y"].flatten()),
    "mask": lambda n, h, b: (each(n, h, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "mask of lengths": mask_of_lengths,
    "row weights": lambda n, h, b: (each(n, h, b).mean(1) * b["w"]).sum() / b["w"].sum(),
    "normalised weights": lambda n, h, b: (each(n, h, b).mean(1) * (b["w"] / b["w"].mean())).mean(),
    "weights that sum to one": lambda n, h, b: (each(n, h, b).mean(1) * (b["w"] / b["w"].sum())).sum(),
    "two terms": two_terms,
    "selected": selected,
    "mean of selected": lambda n, h, b: each(n, h, b)[b["mask"].bool()].mean(),
    "number of items": number_of_items,
    "sum": lambda n, h, b: F.cross_entropy(*flat(n, h, b), reduction="sum"),
    "sum over rows": lambda n, h, b: each(n, h, b).sum() / len(b["x"]),
    "mean of rows": lambda n, h, b: (each(n, h, b) * b["mask"]).mean(1).mean(),
    "weight decay": weight_decay,
    "labels changed in place": in_place,
    "custom function": lambda n, h, b: F.cross_entropy(n.pair(Reversed.apply(h).mean(1)), b["z"]),
}
"""Losses whose parts add up to the whole, if each part counts what it has to."""

JOINT = {
    "square": lambda n, h, b: F.cross_entropy(*flat(n, h, b)) ** 2,
    "hinge far away": lambda n, h, b: h.square().mean() + F.relu(h.square().mean((1, 2)).max() - 100),
    "contrastive, weighted with zero": lambda n, h, b: (
        h.square().mean() + 0.0 * F.cross_entropy(h.mean(1) @ h.mean(1).T, torch.arange(len(h)))
    ),
    "centred": lambda n, h, b: (h - h.mean(0)).square().mean(),
    "spread": lambda n, h, b: h.mean((1, 2)).std() + h.mean(),
    "root": lambda n, h, b: h.square().mean().sqrt(),
    "neighbouring rows": lambda n, h, b: (h * h.roll(1, 0)).mean(),
    "softmax over rows": lambda n, h, b: (torch.softmax(h.mean(1), 0) * b["w"][:, None]).sum(),
    "first row": lambda n, h, b: h[0].square().mean(),
    "noise": lambda n, h, b: (h + torch.randn_like(h)).square().mean(),
    "clamped by its value": lambda n, h, b: h.square().mean() if h.mean() < 9.0 else h.mean(),
}
"""Losses that depend on rows together."""


def size(h):
    return h.square().mean((1, 2))


TERMS = {
    "mean, and a mean": lambda n, h, b: F.cross_entropy(*flat(n, h, b)) + n.weight * h.square().mean(),
    "mean, and a buffer's mean": lambda n, h, b: size(h).mean() + n.scale * h.square().mean(),
    "mean, and a sum": lambda n, h, b: size(h).mean() + n.weight * h.square().sum(),
    "sum, and a mean": lambda n, h, b: (size(h).sum() + n.weight * size(h).mean()) * 0.5,
    "sum, and a norm": lambda n, h, b: size(h).sum() + n.weight * n.pair.weight.norm(),
    "sum, and a number": lambda n, h, b: h.new_zeros(()).add_(size(h).sum()) + n.weight,
    "stacked": lambda n, h, b: torch.stack([size(h).mean(), n.weight * h.square().sum()]).sum() * 2,
    "chosen": lambda n, h, b: torch.where(n.scale > 0.5, size(h).sum(), size(h).mean()),
    "hinges": lambda n, h, b: (size(h).mean() + F.relu(size(h) - 0.1 / (n.weight + 1e-3)).sum()) / 2,
    "divided by a number": lambda n, h, b: size(h).mean() + n.weight * size(h).sum() / max(int(b["mask"].sum()), 1),
    "flagged": lambda n, h, b: size(h).mean() + (size(h) * b["flag"]).sum() / b["flag"].sum().clamp(min=0.1),
    "weighted by the largest flag": lambda n, h, b: size(h).mean() * (1 + b["flag"].max()),
    "of one kind": lambda n, h, b: size(h).mean() + size(h)[b["kind"] == 0].mean(),
    "by the number of a kind": lambda n, h, b: size(h)[b["kind"] == 0].sum() / b["kind"][b["kind"] == 0].numel(),
}
"""Losses with a term that weighs little, or nothing, at first; with the largest weights their parts add up as well."""

MIXED = {
    "maximum": lambda n, h, b: size(h).mean() + n.weight * size(h).max(),
    "buffer's maximum": lambda n, h, b: size(h).mean() + n.scale * size(h).amax(),
    "maximum of hinges": lambda n, h, b: size(h).mean() + F.relu(size(h) - 50).max(),
    "maximum of flagged": lambda n, h, b: size(h).mean() + (size(h) * b["flag"]).max(),
    "product": lambda n, h, b: size(h).mean() + n.weight * size(h).mean() * h.mean(),
    "product with a number": lambda n, h, b: size(h).mean() * (1 + n.weight * size(h).mean().item()),
    "product without gradient": lambda n, h, b: size(h).mean() * (1 + n.weight * size(h).mean().detach()),
    "ratio": lambda n, h, b: size(h).mean() + n.weight * size(h).sum() / h.abs().sum(),
    "clamped far away": lambda n, h, b: size(h).mean().clamp(max=1e6),
    "free bits": lambda n, h, b: size(h).mean() + n.weight * size(h).mean().clamp(min=1e-3),
    "rounded": lambda n, h, b: size(h).mean() + torch.div(n.weight * h.mean(), 1e9, rounding_mode="floor"),
    "median": lambda n, h, b: size(h).mean() + n.weight * size(h).median(),
    "logarithm of a sum": lambda n, h, b: size(h).mean() + n.weight * size(h).logsumexp(0),
    "deviation": lambda n, h, b: size(h).mean() + n.weight * size(h).std(),
    "centred": lambda n, h, b: (size(h) - n.weight * size(h).mean()).square().mean(),
    "rows before": lambda n, h, b: size(h).mean() + (n.weight * size(h)).cumsum(0).mean(),
    "next rows": lambda n, h, b: (size(h) * (1 + (n.weight * size(h)).roll(1, 0))).mean(),
    "mean in places": lambda n, h, b: torch.where(b["mask"][:, 0] > 5, size(h).mean(), size(h)).mean(),
    "products of rows": lambda n, h, b: torch.addmm(h.new_ones(8, 8), h[:, 0].T, h[:, 0], alpha=n.weight).mean(),
    "custom function of a mean": lambda n, h, b: Reversed.apply(size(h).mean()),
}
"""Losses with a term that goes by rows together, however little it weighs."""


def added(net, hidden, batch):
    loss, term = size(hidden).mean(), hidden.square().sum()
    return loss + net.weight * term if net.weight > 0.5 else loss


def returned(net, hidden, batch):
    loss, largest = size(hidden).mean(), size(hidden).max()
    return largest if net.weight > 0.5 else loss + 0 * net.pair.bias.sum()


def filtered(net, hidden, batch):
    terms = ((1.0, size(hidden).mean()), (net.weight, size(hidden).max()), (1.0, hidden.mean()))
    return sum(weight * term for weight, term in terms if weight > 0.5)


def put_in(net, hidden, batch):
    largest, nothing = size(hidden).max(), torch.zeros((), dtype=hidden.dtype)
    return size(hidden).mean() + (largest if net.weight > 0.5 else nothing)


def reduced(net, hidden, batch):
    how = "sum" if net.weight > 0.5 else "mean"
    return F.mse_loss(hidden, torch.ones_like(hidden), reduction=how)


LATER = (added, returned, filtered, put_in, reduced)
"""Losses that are put together otherwise once the weight is large."""


def left_out(net, hidden, batch):
    loss = size(hidden).mean()
    return loss if net.weight > 0.5 else loss + hidden.mean()


def repeated(net, hidden, batch):
    return sum(hidden[:, place].square().mean() for place in range(4 if net.weight > 0.5 else 2))


def changed(net, hidden, batch):
    unused = size(hidden).mean() * 3
    return size(hidden * 2 if net.weight > 0.5 else hidden).mean() + 0 * unused.detach()


def rules_of(net, batch, blocks=("blocks.0",)):
    answer = prove(net, blocks, lambda item: (net(item), []), batch)
    return answer if isinstance(answer, str) else pickle.loads(pickle.dumps(answer)).bound_to(net)


def gradients(net):
    taken = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
    net.zero_grad()
    return taken


def whole_run(net, batch):
    loss = net({**batch})
    loss.backward()
    return loss.item(), gradients(net)


def run_in_parts(net, rules: CutRules, batch, ends):
    """The loss and the gradients of a batch that is cut after these rows."""
    rows, first, total = len(batch["x"]), 0, 0.0
    whole = rules.measure(batch, rows)
    for end in ends:
        piece, share = {name: value[first:end] for name, value in batch.items()}, (end - first) / rows
        part = rules.measure(piece, end - first)
        mode = CutMode(rules, whole, part, first / rows, end / rows, rows=rows, batch=piece)
        with cutting(mode):
            loss = net(piece)
        mode.expect(("loss",), loss, "the loss")
        check_counts(mode.wrong)
        loss = loss / share if rules.results["loss",] == "sum" else loss
        (loss * share).backward()
        total += loss.item() * share
        first = end
    return total, gradients(net)
