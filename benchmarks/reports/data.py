"""Reports about batches, samplers, logging, metrics, and what is collected over an epoch."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMetric
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.reports.cases import Reports, of
from benchmarks.uses.session import Session
from tests.traps.project import LAYERS, VOCABULARY, WIDTH, Project, Rows, loader

reports = Reports("data and logging")


class Graphs:
    """Several graphs as one: tokens of all nodes, edges between them, of which graph each is, labels of graphs."""

    def __init__(self, tokens: Tensor, edges: Tensor, graph: Tensor, labels: Tensor) -> None:
        self.tokens, self.edges, self.graph, self.labels = tokens, edges, graph, labels

    @property
    def num_graphs(self) -> int:
        return len(self.labels)

    def to(self, *places: Any, **options: Any) -> "Graphs":
        values = (self.tokens, self.edges, self.graph, self.labels)
        return Graphs(*(item.to(*places, **options) for item in values))

    @classmethod
    def joined(cls, rows: Any) -> "Graphs":
        counts = [2 + int(row["index"]) % 4 for row in rows]
        starts = [sum(counts[:at]) for at in range(len(counts))]
        edges = [(at + i, at + i + 1) for at, count in zip(starts, counts, strict=True) for i in range(count - 1)]
        return cls(
            torch.cat([row["x"][:count] for row, count in zip(rows, counts, strict=True)]),
            torch.tensor(edges).T,
            torch.arange(len(rows)).repeat_interleave(torch.tensor(counts)),
            torch.stack([row["z"] for row in rows]),
        )


class Messages(nn.Module):
    """Adds to each node what comes from its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        received = torch.zeros_like(hidden).index_add(0, end, self.other(hidden)[start])
        return hidden + torch.tanh(self.own(hidden) + received)


@reports("pyg-team/pytorch_geometric#9829", "Issue with inferring batch size when using PyTorch Lightning")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = of(*(Messages() for _ in range(LAYERS)))

        def loss(self, batch: Any) -> Tensor:
            hidden = self.embed(batch.tokens)
            for block in self.blocks:
                hidden = block(hidden, batch.edges)
            pooled = torch.zeros(batch.num_graphs, WIDTH, dtype=hidden.dtype).index_add(0, batch.graph, hidden)
            return F.cross_entropy(self.pair(pooled), batch.labels)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=batch.num_graphs)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=batch.num_graphs)

    session.fit(Net(), loader(48, collate_fn=Graphs.joined), loader(18, seed=1, collate_fn=Graphs.joined))


class ByCost(Sampler[list[int]]):
    """Batches of as many rows as a budget allows, other numbers on other ranks; it has no length."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        at = self.rank
        for count in ((4, 3, 5, 2), (4, 5, 2, 6))[self.rank]:
            yield list(range(at, at + 2 * count, 2))
            at += 2 * count


@reports("pyg-team/pytorch_geometric#7724", "Using `pyg` sampler causes lightning to skip validation step")
def _(session: Session) -> None:
    train = DataLoader(Rows(48), batch_sampler=ByCost(session.rank))
    session.fit(Project(), train, loader(16, seed=1), use_distributed_sampler=False, val_check_interval=2)


@reports.project("Lightning-AI/pytorch-lightning#19106", "Deadlock on `log_dict` with different keys across ranks")
class OwnNames(Project):
    """Logs by names that one rank's batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none").mean(1)
        self.log_dict({f"loss of {int(index) % 3}": loss for index, loss in zip(batch["index"], each, strict=True)})
        self.log("parity", float(batch["index"][0] % 2), on_step=False, on_epoch=True)
        if batch["index"][0] % 2:
            self.log("odd", each.mean(), on_step=True, on_epoch=False)
        return each.mean()


@reports.project("Lightning-AI/pytorch-lightning#19604", "Deadlock when manually logging from on_train_epoch_end")
class ByEpoch(Project):
    """Keeps losses, and logs their mean over all ranks when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.kept).mean()
        self.kept.clear()
        self.log("epoch_mean", mean, sync_dist=True)
        self.log("every_mean", self.all_gather(mean).mean())


@reports("Project-MONAI/MONAI#4659", "Processes are locked when do validation in DDP training")
def _(session: Session) -> None:
    class Net(Project):
        """Brings scores of rows together from ranks that have differing numbers of them."""

        def on_validation_epoch_start(self) -> None:
            self.scores: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.append((self.logits(batch).argmax(-1) == batch["y"]).double().mean(1))

        def on_validation_epoch_end(self) -> None:
            mine = torch.cat(self.scores)
            count = torch.tensor([len(mine)])
            counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
            dist.all_gather(counts, count)
            most = int(max(counts))
            padded = [torch.zeros(most, dtype=mine.dtype) for _ in counts]
            dist.all_gather(padded, F.pad(mine, (0, most - len(mine))))
            every = torch.cat([part[: int(size)] for part, size in zip(padded, counts, strict=True)])
            self.log("score", every.mean().item())
            session.keep("scores", [every])

    rows = list(range(7 if session.rank else 10))
    val = DataLoader(torch.utils.data.Subset(Rows(16, 1), rows), batch_size=4)
    train = loader(sampler=torch.utils.data.DistributedSampler(Rows(48), 2, session.rank, shuffle=False))
    session.fit(Net(), train, val, use_distributed_sampler=False)


@reports.project("open-edge-platform/anomalib#2622", "[Bug]: Training on multiple GPUs via DDP does not work in 2.0.0")
class Bank(Project):
    """Trains nothing: it collects features, and measures how far others are from them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.dummy = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("bank", torch.zeros(0, WIDTH, dtype=torch.float64))
        self.found: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.found.append(self.hidden(batch).mean(1))
        return 0.0 * self.dummy.sum()

    def on_train_epoch_end(self) -> None:
        self.bank = torch.cat(self.found)[::3]
        self.found.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(self.bank):
            self.log("far", torch.cdist(self.hidden(batch).mean(1), self.bank).amin(1).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.dummy], lr=0.1)


@reports.project(
    "Lightning-AI/torchmetrics#1890",
    "MinMetric produces incorrect result when used with MetricCollection and compute_groups=True",
)
class Extremes(Project):
    """Metrics of one input whose states are joined in different ways."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"least": MinMetric(), "most": MaxMetric(), "mean": MeanMetric()}
        self.measured = MetricCollection(kinds, compute_groups=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none").mean(1)
        self.measured.update(each.detach())
        self.log_dict(dict(self.measured.items()), on_step=False, on_epoch=True)
        return each.mean()


@reports.project("Lightning-AI/pytorch-lightning#20223", "metric.compute() hangs when using DDP with multiple GPUs")
class BySplit(Project):
    """Metrics in dictionaries of dictionaries, computed by hand when an epoch of training or validation ends."""

    def __init__(self) -> None:
        super().__init__()
        kinds = lambda: nn.ModuleDict({"hits": MulticlassAccuracy(VOCABULARY), "loss": MeanMetric()})  # noqa: E731
        self.by_split = nn.ModuleDict({"fitting": kinds(), "testing": kinds()})

    def measured(self, batch: Any, split: str) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        self.by_split[split]["hits"].update(logits.argmax(-1), batch["y"])
        self.by_split[split]["loss"].update(loss.detach())
        return loss

    def computed(self, split: str) -> None:
        for name, metric in self.by_split[split].items():
            self.log(f"{split} {name}", metric.compute())
            metric.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.measured(batch, "fitting")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measured(batch, "testing")

    def on_train_epoch_end(self) -> None:
        self.computed("fitting")

    def on_validation_epoch_end(self) -> None:
        self.computed("testing")
