"""Reports about optimizers, gradients, averages, freezing, random numbers and manual optimisation."""

import copy
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.reports.cases import Reports, WithNorms, Wrapped, fitted
from benchmarks.uses.session import Session
from tests.traps.project import LAYERS, ROWS, WIDTH, Project, loader

reports = Reports("training")


@reports(
    "Lightning-AI/pytorch-lightning#17847", "New official Pytorch EMA gives RunTimeError when using Lightning with DDP"
)
def _(session: Session) -> None:
    class Net(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.average.update_parameters(self.net)

        def on_train_end(self) -> None:
            self.net = self.average.module

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    trainer = fitted(session, module := Net())
    session.keep("averaged", trainer.test(module, loader(16, seed=2), verbose=False))


class Gradual(BaseFinetuning):
    """Freezes all but the last layers, and trains one more in every epoch, at a lower rate."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.embed, *pl_module.blocks[:2]], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch > 0:
            self.unfreeze_and_add_param_group(pl_module.blocks[2 - epoch], optimizer, lr=1e-3)


@reports("Lightning-AI/pytorch-lightning#8933", "Finetuning Callback crashes when using DeepSpeed")
def _(session: Session) -> None:
    class Net(Project):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.05, momentum=0.9)

    fitted(session, Net(), callbacks=[Gradual()], max_epochs=3)


@reports(
    "Lightning-AI/pytorch-lightning#15062",
    "BaseFinetuning freeze method doesn't freeze track_running_stats in BatchNorm",
)
def _(session: Session) -> None:
    class Net(WithNorms):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.05)

    class Keep(Gradual):
        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            """All that is frozen stays so."""

    fitted(session, Net(), callbacks=[Keep()])


@reports.project(
    "Lightning-AI/pytorch-lightning#18930",
    "Identify parts of the models that are set in '.eval()' mode during initialization and keep them in eval mode "
    "after validation epoch ends",
)
class Extracts(Project):
    """Has a frozen part in evaluation mode, whose statistics and dropout would change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.extractor = nn.Sequential(*layers).double().eval().requires_grad_(False)

    def hidden(self, batch: Any) -> Tensor:
        found = self.extractor(self.embed(batch["x"]).flatten(0, 1)).view(*batch["x"].shape, WIDTH)
        for block in self.blocks:
            found = block(found)
        return found


class Lamb(torch.optim.Optimizer):
    """Adam whose step has the length of the layer's weights (You et al., 2020)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is None:
                    continue
                state = self.state[item]
                if not state:
                    state.update(mean=torch.zeros_like(item), square=torch.zeros_like(item))
                state["mean"].lerp_(item.grad, 0.1)
                state["square"].lerp_(item.grad.square(), 0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-3) + 0.01 * item
                length, wanted = update.norm(), item.norm()
                ratio = wanted / length if wanted > 0 and length > 0 else 1.0
                item.sub_(group["lr"] * ratio * update)
        return loss


@reports.project("deepspeedai/DeepSpeed#490", "Parameter fusion in optimizer partition makes lamb behaves differently")
class ByLayer(Project):
    """An optimizer that measures whole layers."""

    def configure_optimizers(self) -> Any:
        return Lamb(self.parameters(), lr=0.05)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal; the rest by signs."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for item in (item for item in group["params"] if item.grad is not None):
                state = self.state[item]
                kept = state.setdefault("momentum", torch.zeros_like(item)).mul_(0.9).add_(item.grad)
                if item.ndim < 2:
                    item.sub_(group["lr"] * kept.tanh())
                    continue
                matrix = kept / (kept.norm() + 1e-7)
                for _ in range(4):
                    matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
                item.sub_(group["lr"] * matrix)
        return loss


@reports.project(
    "MoonshotAI/Moonlight#27", "[Bug] zeropower_via_newtonschulz5 will get -inf value when using torch FSDP"
)
class ByMatrix(Project):
    """An optimizer that needs whole matrices as matrices."""

    def configure_optimizers(self) -> Any:
        return Muon(self.parameters(), lr=0.02)


@reports.project(
    "pytorch/pytorch#101343", "Applying Weight Decay to certain parameters with FSDP", accumulate_grad_batches=2
)
class Decayed(Project):
    """Groups by dimensions and by layer, each with a decay and a schedule of its own."""

    def configure_optimizers(self) -> Any:
        groups = []
        for depth, part in enumerate((self.embed, *self.blocks, self.head)):
            for decay in (0.1, 0.0):
                chosen = [item for item in part.parameters() if (item.ndim > 1) == (decay > 0)]
                if chosen:
                    groups.append({"params": chosen, "weight_decay": decay, "lr": 1e-2 * 0.8 ** (LAYERS - depth)})
        optimizer = torch.optim.AdamW(groups, eps=1e-3)
        rates = [lambda step, at=at: (1 + at) / (1 + at + step) for at in range(len(groups))]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@reports.project("pytorch/pytorch#72548", "Implement clip_grad_norm for FSDP models", gradient_clip_val=0.2)
class ClippedApart(Project):
    """Clips its parts apart, each by the norm of its own gradients, and logs these."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        norm = nn.utils.clip_grad_norm_(self.blocks.parameters(), gradient_clip_val)
        nn.utils.clip_grad_value_(self.head.parameters(), 0.01)
        self.log("norm", norm)


@reports.project(
    "Lightning-AI/pytorch-lightning#4956", "how to properly skip samples that cause inf/nan gradients/loss"
)
class Careful(Project):
    """Drops all gradients when one is not finite, as those of one batch of one rank are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("nan") if (batch["index"] == 4 * ROWS + 1).any() else 1.0)

    def on_after_backward(self) -> None:
        found = [item.grad for item in self.parameters() if item.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in found):
            self.zero_grad()


@reports.project("Lightning-AI/pytorch-lightning#12190", "DDP training hangs when one GPU returns zero loss")
class Nothing(Project):
    """Has nothing to learn from some batches of one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        if batch["index"][0] % (2 * ROWS) == 1 and batch_idx % 2:
            return logits.sum() * 0.0
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


@reports.project("lucidrains/DALLE-pytorch#268", "Does (horovod + learning rate decay) work properly?", max_epochs=4)
class OwnRate(Project):
    """Lowers its rate by what one rank sees: ranks have other rates."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        rises = (batch["index"] % 2).double().mean()
        self.log("seen", loss.detach() * (1 + 2 * rises * self.current_epoch), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "seen"}}


@reports(
    "huggingface/transformers#35203", "gradient calculation is not correct with gradient accumulation in LM training"
)
def _(session: Session) -> None:
    class Net(Project):
        """Weighs every token of a window alike, over its batches and over ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            labels = [part["y"].masked_fill(part["y"] % 5 == part["index"][:, None] % 5, -100) for part in batch]
            count = sum((label != -100).sum() for label in labels)
            count = self.all_gather(count).sum() / self.trainer.world_size
            optimizer, total = self.optimizers(), torch.zeros((), dtype=torch.float64)
            optimizer.zero_grad()
            for part, label in zip(batch, labels, strict=True):
                loss = F.cross_entropy(self.logits(part).flatten(0, 1), label.flatten(), reduction="sum") / count
                self.manual_backward(loss)
                total += loss.detach()
            optimizer.step()
            self.log("train_loss", total, batch_size=1)
            return total

    def parted(rows: Any) -> Any:
        return [torch.utils.data.default_collate(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)]

    data = loader(48).dataset
    session.fit(Net(), torch.utils.data.DataLoader(data, batch_size=3 * ROWS, collate_fn=parted))


@reports.project("Lightning-AI/pytorch-lightning#19985", "Add truncated backpropagation through time (TBPTT) example")
class Truncated(Project):
    """Steps after every piece of a sequence, and carries a state on."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True).double()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, state = self.optimizers(), None
        for tokens, labels in zip(batch["x"].split(2, 1), batch["y"].split(2, 1), strict=True):
            hidden, state = self.gru(self.embed(tokens), state)
            for block in self.blocks:
                hidden = block(hidden)
            loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            state = state.detach()
        self.log("train_loss", loss)
        return loss.detach()


class ScheduleFree(torch.optim.Optimizer):
    """Steps at a point between the last weights and their mean; evaluation wants the mean (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0})
        self.is_training = True

    @torch.no_grad()
    def mode(self, is_training: bool) -> None:
        for group in self.param_groups if is_training != self.is_training else ():
            weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
            for item in group["params"]:
                if "last" in self.state[item]:
                    item.lerp_(self.state[item]["last"], weight)
        self.is_training = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] += 1
            share = 1 / group["count"]
            for item in (item for item in group["params"] if item.grad is not None):
                last = self.state[item].setdefault("last", item.clone())
                item.lerp_(last, share).add_(item.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                last.sub_(item.grad, alpha=group["lr"])
        return loss


@reports.project("facebookresearch/schedule_free#60", "Validation with batch norm")
class Means(WithNorms):
    """Evaluates with other weights than it trains, and makes statistics for them first."""

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=0.1)

    def on_validation_start(self) -> None:
        self.optimizers().optimizer.mode(False)
        self.train()
        with torch.no_grad():
            for batch in islice(loader(24, seed=3), 3):
                self.logits(batch)
        self.eval()

    def on_validation_end(self) -> None:
        self.optimizers().optimizer.mode(True)


@reports.project(
    "pytorch/rl#1401", "[Feature Request] Decouple target net updater from loss functions", layers=2 * LAYERS
)
class Target(Wrapped):
    """Learns from what a copy says, which is brought up to date after every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = batch["z"][:, None] + 0.9 * self.target(batch["y"]).max(-1).values
        taken = self.logits(batch).gather(-1, batch["y"][..., None])[..., 0]
        return F.smooth_l1_loss(taken, wanted)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.target.load_state_dict(self.net.state_dict())


@reports(
    "Lightning-AI/pytorch-lightning#17958",
    "incorrect global_step with multiple optimizers and automatic_optimization=False",
)
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            parts = (self.blocks.parameters(), (*self.embed.parameters(), *self.head.parameters()))
            optimizers = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
            return optimizers, [torch.optim.lr_scheduler.StepLR(item, 1, 0.5) for item in optimizers]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            session.keep("counted", [self.global_step])
            return loss

        def on_train_epoch_end(self) -> None:
            for schedule in self.lr_schedulers():
                schedule.step()

    keep = ModelCheckpoint(session.folder / "checkpoints", every_n_train_steps=4, save_top_k=-1)
    session.fit(Net(), callbacks=[keep], enable_checkpointing=True, max_steps=16, max_epochs=-1)


@reports("Lightning-AI/pytorch-lightning#6675", "Learning Rate Finder doesn't reset model parameters")
def _(session: Session) -> None:
    class Net(WithNorms):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    module, trainer = Net(), session.trainer(callbacks=())
    found = Tuner(trainer).lr_find(module, loader(), num_training=6, early_stop_threshold=None)
    session.keep("curve", found.results)
    session.keep("restored", module.state_dict())
    trainer.fit(module, loader(), loader(16, seed=1))
    session.keep_state(trainer, module)


@reports.project(
    "huggingface/transformers#31412",
    "Dropout sync across GPUs causes major performance drops",
    said="parts of a batch draw other dropout masks",
)
class OwnMasks(Project):
    """Every rank draws masks of its own."""

    def on_train_start(self) -> None:
        torch.manual_seed(100 + self.global_rank)

    def hidden(self, batch: Any) -> Tensor:
        return F.dropout(super().hidden(batch), 0.2, self.training)


@reports.project(
    "lightly-ai/lightly#1977",
    "[BUG] BarlowTwinsLoss with `gather_distributed=True` produces gradient which is off by `1/world_size` under DDP",
    layers=0,
)
class Decorrelated(Wrapped):
    """Decorrelates features over the rows of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (F.layer_norm(self.net(batch[name]).mean(1), (17,)) for name in ("x", "y"))
        shared = Summed.apply(first.T @ second) / (len(first) * self.trainer.world_size)
        on, off = shared.diagonal(), shared - shared.diagonal().diag()
        return (1 - on).square().sum() + 0.05 * off.square().sum()


class Summed(torch.autograd.Function):
    """A sum over ranks, whose gradient is one too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@reports.project("lucidrains/vector-quantize-pytorch#25", "kmeans and ddp hangs")
class Quantized(Project):
    """Rounds features to codes that the first batch of all ranks gives, and that follow the features from then on."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(count, WIDTH, dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(count, WIDTH, dtype=torch.float64))
        self.register_buffer("counts", torch.ones(count, dtype=torch.float64))
        self.register_buffer("is_ready", torch.tensor(False))

    @torch.no_grad()
    def start(self, found: Tensor) -> None:
        every = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found.contiguous())
        rows = torch.cat(every)
        codes = rows[:: len(rows) // len(self.codes)][: len(self.codes)].clone()
        for _ in range(3):
            choice = torch.cdist(rows, codes).argmin(-1)
            for code in range(len(codes)):
                if (choice == code).any():
                    codes[code] = rows[choice == code].mean(0)
        self.codes.copy_(codes)
        self.sums.copy_(codes)
        self.is_ready.fill_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.hidden(batch)
        flat = hidden.flatten(0, 1)
        if not self.is_ready:
            self.start(flat.detach())
        choice = torch.cdist(flat.detach(), self.codes).argmin(-1)
        one_hot = F.one_hot(choice, len(self.codes)).double()
        rounded = self.codes[choice]
        with torch.no_grad():
            counts, sums = one_hot.sum(0), one_hot.T @ flat
            dist.all_reduce(counts)
            dist.all_reduce(sums)
            self.counts.lerp_(counts, 0.1)
            self.sums.lerp_(sums, 0.1)
            self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        logits = self.head((flat + (rounded - flat).detach()).view_as(hidden))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return loss + 0.25 * F.mse_loss(flat, rounded)
