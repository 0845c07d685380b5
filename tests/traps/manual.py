"""Steps that call backward and step their optimizers themselves, some as only plain data parallelism knows them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.own_optimizers import Coupled
from tests.traps.project import VOCABULARY, WIDTH, Block, Project, Trap, loader


class Manual(Project):
    """Steps one optimizer by hand, clips, and lowers its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.seen = False, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.by_hand(self.loss(batch), batch_idx)

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss)
        return loss


class Unseen(Manual):
    """Runs on real numbers only, so that nothing is known of its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if type(loss) is not torch.Tensor:
            raise RuntimeError("the loss has no value")
        return self.by_hand(loss, batch_idx)


class Accumulates(Manual):
    """Steps every second batch; the rest of an epoch goes into the next."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=batch_idx == 1)
        return loss


class Twice(Manual):
    """Steps twice on the same gradients, which it only clears later."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.step()
        if batch_idx % 3 == 0:
            optimizer.zero_grad()
        return loss


class Closure(Manual):
    """Runs backward in a closure, in which all groups must be whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, losses = self.optimizers(), []

        def closure() -> Any:
            optimizer.zero_grad()
            losses.append(self.loss(batch))
            self.manual_backward(losses[-1])
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data.clamp_(-0.9, 0.9)
            return losses[-1]

        optimizer.step(closure)
        return losses[-1].detach()


class Skips(Manual):
    """Skips every third step."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx % 3 == 1:
            return loss
        return super().by_hand(loss, batch_idx)


class SkipsByLoss(Manual):
    """Skips a step by what it sees of its own rows, as ranks part by."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if not self.trainer.is_global_zero or batch_idx != 2:
            optimizer.step()
        return loss


class Looks(Manual):
    """Looks at a gradient before it steps."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.seen.append(float(self.head.weight.grad.norm()))
        optimizer.step()
        return loss


class LooksAtState(Manual):
    """Looks at moments of all parameters."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        super().by_hand(loss, batch_idx)
        state = self.optimizers().optimizer.state
        self.seen.append(sum(float(entry["exp_avg"].norm()) for entry in state.values()))
        return loss


class Raw(Manual):
    """Calls the loss's own backward, by which ranks part under DDP."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss


class Unsynchronised(Manual):
    """Averages every second backward only."""

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=bool(batch_idx % 2)):
            self.manual_backward(loss)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
        return loss


class Gan(Project):
    """A generator and a critic; the generator's backward fills gradients of the critic.

    Args:
        toggles: Whether only one of them is trained at a time.
        penalty: Whether the critic's gradient by its input is kept near one.
        clears: Whether what the generator's backward leaves with the critic is cleared.
        norm: What the critic has between its layers.
    """

    def __init__(
        self, *, toggles: bool = False, penalty: bool = False, clears: bool = True, norm: Any = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.automatic_optimization, self.toggles, self.penalty, self.clears = False, toggles, penalty, clears
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.critic.double()

    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return torch.optim.AdamW(own, lr=1e-2, eps=1e-3), torch.optim.SGD(
            self.critic.parameters(), lr=0.1, momentum=0.9
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, critic = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(generator)
        made = self.hidden(batch)[:, -1]
        loss = F.softplus(-self.critic(made)).mean()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(critic)
        if self.clears:
            critic.zero_grad()
        found = made.detach().requires_grad_()
        real = self.embed(batch["y"])[:, -1].detach()
        verdict = self.critic(found)
        lost = F.softplus(verdict).mean() + F.softplus(-self.critic(real)).mean()
        if self.penalty:
            (slope,) = torch.autograd.grad(verdict.sum(), found, create_graph=True)
            lost = lost + (slope.norm(dim=-1) - 1).square().mean()
        self.manual_backward(lost)
        self.clip_gradients(critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic.step()
        if self.clears:
            critic.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(critic)
        self.log_dict({"generator": loss, "critic": lost})
        return {"loss": lost, "generator": loss.detach()}


class Saves(Callback):
    """Saves after each epoch, and looks at what all optimizers have in the file."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        path = Path(trainer.default_root_dir) / "in the fit.ckpt"
        trainer.save_checkpoint(path)
        if trainer.global_rank == 0:
            found = torch.load(path, weights_only=False)["optimizer_states"]
            self.seen += [value for item in found for value in _sums(item["state"])]


def _sums(state: Any) -> list[float]:
    return [float(value.sum()) for number in sorted(state) for _, value in sorted(state[number].items())]


class Lbfgs(Manual):
    """An optimizer that calls its closure as often as it likes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class Couples(Manual):
    """An optimizer that looks at all parameters, beside one that does not."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters(), lr=0.1), Coupled(self.head.parameters())]

    def by_hand(self, loss: torch.Tensor, batch_idx: int) -> Any:
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss


class Counting(Block):
    """A layer that counts its forwards, before it computes: recomputation ends with what backward needs.

    Args:
        begins: With which step.
        with_metric: Whether a metric counts.
    """

    def __init__(self, owner: list[Any], *, begins: int, with_metric: bool) -> None:
        super().__init__()
        self.owner, self.begins, self.count = owner, begins, 0
        self.metric = SumMetric() if with_metric else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.owner[0].global_step >= self.begins:
            if self.metric is None:
                self.count += 1
            else:
                self.metric.update(1.0)
        return super().forward(hidden)


class Counts(Manual):
    """Has layers that count."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting([self], **options) for _ in self.blocks]).double()
        self.counters = list(self.blocks)

    def on_train_epoch_end(self) -> None:
        self.seen += [float(item.metric.sum_value if item.metric else item.count) for item in self.counters]


class Measures(Manual):
    """Logs what metrics give, returns it, and trains with it.

    Args:
        computes: Whether it trains with it.
    """

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.acc, self.mean, self.computes = MulticlassAccuracy(VOCABULARY), MeanMetric(), computes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["y"].flatten())
        acc = self.acc(logits, batch["y"].flatten())
        self.mean.update(loss)
        self.log_dict({"acc": acc, "mean": self.mean})
        if self.computes:
            loss = loss * (1.5 - float(acc)) + 0.1 * self.mean.compute()
        return {"loss": self.by_hand(loss, batch_idx), "acc": acc}


class GanTwice(Gan):
    """Runs the generator's layers twice in every second step.

    Args:
        first: Whether in the first, which is the one that planning sees.
    """

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator, critic = self.optimizers()
        with self.toggled_optimizer(critic):
            lost = F.softplus(self.critic(self.hidden(batch)[:, -1])).mean()
            self.manual_backward(lost)
            critic.step()
            critic.zero_grad()
        if batch_idx % 2 != self.first:
            with self.toggled_optimizer(generator):
                loss = F.softplus(-self.critic(self.hidden(batch)[:, -1])).mean() + self.loss(batch)
                self.manual_backward(loss)
                generator.step()
                generator.zero_grad()
        return lost


_EQUAL = ("zero1", "zero2", "checkpointed", "moved0", "movedstate")
_NEVER = ("zero3", "pp2", "halves", "tp2", "moved")
_PARTS = ("zero1", "zero2", "movedstate")

TRAPS = {
    "manual": Trap(
        module=Manual,
        plans=(*_EQUAL, *_NEVER, "auto", "plain"),
        equal=(*_EQUAL, "auto", "plain"),
        reason="automatic_optimization=False",
    ),
    "unseen": Trap(
        module=Unseen,
        plans=("zero1w", "zero2w", "movedw", "checkpointed"),
        equal=("zero1w", "zero2w", "movedw"),
        reason="the module has 0 repeated blocks",
    ),
    "accumulates": Trap(module=Accumulates, plans=_EQUAL, equal=_EQUAL),
    "twice": Trap(module=Twice, plans=_EQUAL, equal=_EQUAL),
    "closure": Trap(module=Closure, plans=_EQUAL, equal=_EQUAL),
    "skips": Trap(module=Skips, plans=_EQUAL, equal=_EQUAL),
    "skips-by-loss": Trap(module=SkipsByLoss, plans=("zero1",), reason="decide by what is the same on every rank"),
    "looks": Trap(module=Looks, plans=_PARTS, reason="may look at gradients (grad in by_hand"),
    "looks-at-state": Trap(
        module=LooksAtState,
        plans=(*_PARTS, "checkpointed"),
        equal=("checkpointed",),
        reason="may look at optimizer state (state in by_hand",
    ),
    "raw": Trap(module=Raw, plans=_EQUAL, reason="outside of self.manual_backward"),
    "unsynchronised": Trap(module=Unsynchronised, plans=("zero1", "checkpointed"), reason="sync_grad=False"),
    "gan": Trap(module=Gan, plans=_EQUAL, equal=_EQUAL),
    "gan-toggled": Trap(module=lambda: Gan(toggles=True), plans=_EQUAL, equal=_EQUAL),
    "gan-uncleared": Trap(module=lambda: Gan(clears=False), plans=_EQUAL, equal=_EQUAL),
    "gan-saved": Trap(
        module=lambda: Gan(toggles=True),
        callbacks=lambda: [Saves()],
        val=lambda: loader(16, seed=1),
        then=("save", "go on"),
        plans=_EQUAL,
        equal=_EQUAL,
    ),
    "gan-penalised": Trap(module=lambda: Gan(penalty=True), plans=_EQUAL, equal=_EQUAL),
    "gan-with-statistics": Trap(
        module=lambda: Gan(norm=nn.BatchNorm1d),
        plans=_EQUAL,
        equal=_PARTS,
        reason="running statistics see whole batches",
    ),
    "gan-twice": Trap(
        module=lambda: GanTwice(first=True),
        plans=_EQUAL,
        equal=_EQUAL,
    ),
    "gan-twice-later": Trap(module=lambda: GanTwice(first=False), plans=_EQUAL, equal=_EQUAL),
    **{
        f"counts-{'late-' * (begins > 0)}{'by-metric' if with_metric else 'by-hand'}": Trap(
            module=partial(Counts, begins=begins, with_metric=with_metric),
            plans=("zero1", "checkpointed"),
            equal=("zero1",),
            reason="blocks.0",
        )
        for begins in (0, 3)
        for with_metric in (False, True)
    },
    "measures": Trap(module=lambda: Measures(computes=False), plans=_EQUAL, equal=_EQUAL),
    "measures-and-computes": Trap(
        module=lambda: Measures(computes=True),
        plans=("zero1", "checkpointed"),
        equal=("zero1",),
        reason="the step talks to other processes itself",
    ),
    "lbfgs": Trap(module=Lbfgs, plans=("zero1", "checkpointed"), reason="LBFGS calls the step several times"),
    "couples": Trap(module=Couples, plans=("zero1",), reason="Coupled couples parameters"),
}
