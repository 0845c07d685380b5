"""Who looks at what is in host memory, or changes it: between steps, in the step, and while it is on its way."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.project import VOCABULARY, WIDTH, Block, Project, Trap

MOVED = ("moved", "moved3", "movedpp", "movedstate", "moved0")
INPUTS = ("movedinputs",)


class GatedBlock(Block):
    """A block with a gate that is not its own."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * gate


class StateRead(pl.Callback):
    """Reads the optimizer's state after every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state
        self.seen.append(sum(float(entry["exp_avg"].square().sum()) for entry in state.values()))


class StateHalved(pl.Callback):
    """Halves the momenta in every third batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            for entry in trainer.optimizers[0].state.values():
                entry["exp_avg"].mul_(0.5)


class WeightsRead(pl.Callback):
    """Reads the weights after every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(sum(float(weight.detach().square().sum()) for weight in module.parameters()))


class WeightsReadSomehow(pl.Callback):
    """Reads the weights after every batch, in a way that is not plain from its source."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        read = __import__("operator").methodcaller("parameters")
        self.seen.append(sum(float(weight.detach().square().sum()) for weight in read(module)))


class SavedBetweenSteps(pl.Callback):
    """Saves a checkpoint after every second batch, and looks at what is in it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            return
        path = Path(trainer.default_root_dir) / "between.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            saved = torch.load(path, weights_only=False)
            (optimizer,) = saved["optimizer_states"]
            self.seen += [float(weight.square().sum()) for weight in saved["state_dict"].values()]
            self.seen += [float(entry["exp_avg_sq"].sum()) for entry in optimizer["state"].values()]
            self.seen += [group["lr"] for group in optimizer["param_groups"]]


class WeightsClamped(pl.Callback):
    """Keeps weights small after every batch, as a constraint on them."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for weight in module.parameters():
                weight.clamp_(-0.3, 0.3)


class GradientsRead(pl.Callback):
    """Reads gradients before the optimizer's step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad.square().sum() for p in module.blocks[0].parameters() if p.grad is not None)))


class GradientsReadSomehow(pl.Callback):
    """Reads gradients before the optimizer's step, in a way that is not plain from its source."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        read = __import__("operator").attrgetter("grad")
        found = [read(p) for p in __import__("operator").methodcaller("parameters")(module)]
        self.seen.append(float(sum(g.square().sum() for g in found if g is not None)))


class Zeroed(Project):
    """Gradients are zeros between steps, and not gone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Penalised(Project):
    """A gradient penalty: the step runs a backward of its own, through all layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.embed(batch["x"]).detach().requires_grad_()
        out = hidden
        for block in self.blocks:
            out = block(out)
        loss = F.cross_entropy(self.head(out).flatten(0, 1), batch["y"].flatten())
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().sum()


class PenalisedLater(Project):
    """From the fourth batch on, all weights are penalised before the first layer runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = 0.0
        if batch_idx > 2:
            penalty = sum(weight.square().sum() for weight in self.blocks.parameters())
        return super().training_step(batch, batch_idx) + 1e-2 * penalty


class PeekingLater(Project):
    """From the fourth batch on, the first layer's input depends on the last layer's weights, beside the graph."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 6:
            hidden = hidden * (1.0 + self.blocks[-1].up.weight.detach().square().mean())
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Skipping(Project):
    """The first layer's output is used behind the last, and one tensor in every layer."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        scale, first = hidden.sigmoid(), None
        for block in self.blocks:
            hidden = block(hidden) * scale
            first = hidden if first is None else first
        return hidden + first.tanh()


class Tied(Project):
    """Head and embedding share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.double()


class Sparse(Project):
    """Some parameters have no gradient in some steps, and some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else loss + self.pair(self.embed(batch["x"]).mean(1)).square().sum()


class SeveralGroups(Project):
    """Groups with rates of their own, and a scheduler of every step."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.NAdam(
            [{"params": matrices, "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}], lr=1e-2
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class HookedOptimizer(Project):
    """Hooks of the optimizer's step scale gradients before it, and keep weights small behind it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

        def before(optimizer: Any, *_: Any) -> None:
            for weight in optimizer.param_groups[0]["params"]:
                weight.grad.mul_(0.5)

        def behind(optimizer: Any, *_: Any) -> None:
            for weight in optimizer.param_groups[0]["params"]:
                weight.detach().clamp_(-0.3, 0.3)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(behind)
        return optimizer


class ClampingOptimizer(torch.optim.AdamW):
    """Keeps weights small in its own step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.detach().clamp_(-0.3, 0.3)
        return loss


class Clamping(Project):
    def configure_optimizers(self) -> Any:
        return ClampingOptimizer(self.parameters(), lr=1e-2, eps=1e-3)


class InPlace(Project):
    """Activations are changed in place where autograd allows it."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = F.relu(block(hidden), inplace=True).add_(0.1)
        return hidden


class Gated(Project):
    """One tensor that every layer keeps: those whose inputs move, and those of which nothing does."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        gate = torch.sigmoid(hidden)
        for block in self.blocks:
            hidden = block(hidden, gate)
        return hidden

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GatedBlock() for _ in self.blocks]).double()


class Counted(torch.optim.AdamW):
    """Warms up by a counter of its own in the group, of all parameters together."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 1e-3 * min(1.0, group["count"] / 5)
        return super().step(closure)


class CountingOptimizer(Project):
    def configure_optimizers(self) -> Any:
        return Counted(self.parameters(), lr=1e-3)


class NowAndThen(Sparse):
    """Gradients are gone, zeros or still there between steps, and some parameters have none in some steps."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3:
            optimizer.zero_grad(set_to_none=batch_idx % 3 == 1)


TRAPS = {
    "plain": Trap(plans=MOVED, equal=MOVED),
    "kept by all layers": Trap(module=Gated, plans=INPUTS, equal=INPUTS),
    "inputs in place": Trap(module=InPlace, plans=INPUTS),
    "inputs penalised": Trap(module=Penalised, plans=INPUTS),
    "state read": Trap(callbacks=lambda: [StateRead()], plans=MOVED),
    "state halved": Trap(callbacks=lambda: [StateHalved()], plans=MOVED),
    "weights read": Trap(callbacks=lambda: [WeightsRead()], plans=MOVED, equal=("movedstate",)),
    "weights clamped": Trap(callbacks=lambda: [WeightsClamped()], plans=MOVED),
    "gradients read": Trap(callbacks=lambda: [GradientsRead()], plans=MOVED),
    "weights read somehow": Trap(callbacks=lambda: [WeightsReadSomehow()], plans=MOVED),
    "saved between steps": Trap(
        module=SeveralGroups, callbacks=lambda: [SavedBetweenSteps()], plans=MOVED, equal=MOVED
    ),
    "penalised later": Trap(module=PenalisedLater, plans=MOVED),
    "peeking later": Trap(module=PeekingLater, plans=MOVED, equal=("moved0",)),
    "gradient penalty": Trap(module=Penalised, plans=MOVED),
    "skips": Trap(module=Skipping, plans=MOVED, equal=("moved", "moved3")),
    "tied": Trap(module=Tied, plans=MOVED, equal=MOVED),
    "sparse": Trap(module=Sparse, plans=MOVED),
    "groups and scheduler": Trap(module=SeveralGroups, plans=MOVED, equal=MOVED),
    "accumulated and clipped": Trap(
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, plans=MOVED, equal=MOVED
    ),
    "accumulated and clipped by value": Trap(
        trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        plans=MOVED,
        equal=MOVED,
    ),
    "zeroed, not cleared": Trap(module=Zeroed, plans=MOVED, equal=MOVED),
    "cleared now and then": Trap(module=NowAndThen, plans=MOVED, equal=MOVED),
    "gradients read somehow": Trap(callbacks=lambda: [GradientsReadSomehow()], plans=MOVED),
    "hooks of the step": Trap(module=HookedOptimizer, plans=MOVED),
    "step that clamps": Trap(module=Clamping, plans=MOVED),
    "in place": Trap(module=InPlace, plans=MOVED),
    "counting optimizer": Trap(module=CountingOptimizer, plans=MOVED, reason="Counted"),
}
