"""Projects with master weights: what people do to weights, gradients and optimizers between steps.

They are held against the same arithmetic by Lightning's own means (:mod:`tests.traps.plain_masters`). Where batches and
the network are whole, to the bit; where they are cut, other sums are rounded to 16 bits.
"""

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

from tests.traps.casts import Single
from tests.traps.gradients import ClipsInStep, Watch
from tests.traps.habits import Adaptive, Decays, FlatWeights, OptimizerState, SkipsSteps, WeightNorm
from tests.traps.offload import TRAPS as OFFLOADED
from tests.traps.parameters import Average, Clamps, CopyAtStart, EditsGroups, MeanTeacher
from tests.traps.project import Project, Trap, loader


class Net(Single):
    """In single precision, trained by AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def _single(kind: type[Project]) -> type[Project]:
    """Another family's project in single precision."""

    class InSingle(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.float()

    InSingle.__name__ = InSingle.__qualname__ = kind.__name__
    return InSingle


class Scheduled(Net):
    """A rate that changes with every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Frozen(Net):
    """Some blocks are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.embed.requires_grad_(False)


class Thaws(Frozen):
    """Trains a block from the second epoch on that was frozen before."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[1].parameters())})


class Backbone(Net):
    """As Lightning's own fine-tuning callback wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks


class Freezes(Net):
    """Stops training of a block after the first epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(False)


class Tied(Net):
    """Shares the embedding with the head, and a layer between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[2].up = self.blocks[1].up


class Wide(nn.LayerNorm):
    """Stays in 32 bits whatever the module is converted to, as norms of published models do."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor).to(torch.float32), recurse)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.float()).to(hidden.dtype)


class WideNorms(Net):
    """Norms in 32 bits in a network of 16."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = Wide(block.norm.normalized_shape)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.blocks[0].norm.weight.dtype is torch.float32
        assert self.blocks[0].up.weight.dtype is torch.bfloat16
        return super().training_step(batch, batch_idx)


class Initialises(Net):
    """Makes weights anew when training starts."""

    def on_train_start(self) -> None:
        torch.manual_seed(5)
        nn.init.normal_(self.head.weight, std=0.02)
        self.head.bias.data.normal_(std=1e-4)


class Rebinds(Net):
    """Gives parameters other storage, as ``vector_to_parameters`` and many loops over ``p.data`` do."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.head.parameters():
            parameter.data = parameter.data * 0.9


class RebindsByVector(Net):
    """Writes all weights from one vector."""

    def on_train_batch_end(self, *_: Any) -> None:
        flat = nn.utils.parameters_to_vector(self.blocks.parameters())
        nn.utils.vector_to_parameters(flat * 0.99, self.blocks.parameters())


class Loads(Net):
    """Goes back to the weights of the first epoch in the middle of the second."""

    kept: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        if self.kept is None:
            self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        else:
            self.load_state_dict(self.kept)


class LoadsState(Net):
    """Loads the optimizer's state of before."""

    kept: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            optimizer = self.optimizers()
            if self.kept is not None:
                optimizer.load_state_dict(self.kept)
            self.kept = optimizer.state_dict()


class Halves(Net):
    """Converts itself to 16 bits once more when training starts."""

    def on_train_start(self) -> None:
        self.bfloat16()


class Manual(Net):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Several(Manual):
    """Several optimizers, which Lightning has with manual optimisation only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.blocks, self.head)]


class Sometimes(Net):
    """Leaves a block out of every second step, on one rank earlier than on the other."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for number, block in enumerate(self.blocks):
            if number != 1 or self.global_step % 2:
                hidden = block(hidden)
        return hidden


class Alias(Callback):
    """Keeps tensors of weights from the start, and reads them later."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weight = pl_module.head.weight.data

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(float(self.weight.double().sum()))


class Types(Callback):
    """Sees 32 bits in every hook around the optimizer's step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def _see(self, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            self.seen += [parameter.element_size(), 0 if parameter.grad is None else parameter.grad.element_size()]

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._see(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._see(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._see(pl_module)


class Swa(StochasticWeightAveraging):
    """From the first epoch on, with its own rate."""

    def __init__(self) -> None:
        super().__init__(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)


_PLAIN = "which keeps no masters"
_AWAY = "would not all be on every rank's device"
_CUT = ("cut", "pp2", "tp2")
_WHOLE = ("plain", "zero1", "zero3")
_MOVED = ("moved0", "movedstate", "moved")
_ONE = ("plain",)
"""Whoever uses weights, gradients or state outside of steps needs all of them on every rank."""


def _trap(module: type[Project] = Net, *, plans: tuple[str, ...] = _WHOLE, **options: Any) -> Trap:
    return Trap(module=module, plans=plans, has_masters=True, **{"reason": _AWAY, "tolerance": 1e-12, **options})


def _both(name: str, equal: tuple[str, ...] = (*_WHOLE, *_CUT), **options: Any) -> dict[str, Trap]:
    """A trap where sums are those of one process, and where they are not and other ones are rounded."""
    return {
        name: _trap(equal=tuple(plan for plan in equal if plan in _WHOLE), **options),
        f"{name}, cut": _trap(
            plans=_CUT, equal=tuple(plan for plan in equal if plan in _CUT), tolerance=3e-2, **options
        ),
    }


def _validated() -> Any:
    return loader(16, seed=1)


TRAPS = {
    **_both("plain", module=Net),
    **_both("clipped", trainer={"gradient_clip_val": 0.05}),
    **_both("clipped by value", module=Single, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    **_both("accumulated", trainer={"accumulate_grad_batches": 2}),
    **_both("scheduled", module=Scheduled),
    **_both("frozen", module=Frozen),
    **_both("tied", module=Tied, equal=(*_WHOLE, "cut", "pp2"), reason="others use its parameters too"),
    **_both("weight norm", module=_single(WeightNorm)),
    **_both("wide norms", module=WideNorms),
    **_both("skips steps", module=_single(SkipsSteps)),
    "clips itself": _trap(_single(ClipsInStep), equal=_ONE),
    "adaptive": _trap(_single(Adaptive), equal=_ONE),
    "sometimes": _trap(Sometimes, reason="blocks"),
    "thaws": _trap(Thaws, plans=_ONE, reason="unfrozen"),
    "thaws by hook": _trap(Thaws, plans=("zero1", "zero3"), reason="on_train_epoch_start of Thaws may use parameters"),
    "backbone": _trap(
        Backbone, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)], reason=_PLAIN
    ),
    "freezes": _trap(Freezes),
    "averages": _trap(callbacks=lambda: [Average()], val=_validated, equal=_ONE),
    "copy at start": _trap(callbacks=lambda: [CopyAtStart()], equal=_ONE),
    "ema": _trap(callbacks=lambda: [EMAWeightAveraging(decay=0.9)], val=_validated, reason=_PLAIN),
    "swa": _trap(callbacks=lambda: [Swa()], reason=_PLAIN),
    "mean teacher": _trap(_single(MeanTeacher)),
    "clamps": _trap(_single(Clamps), equal=_ONE),
    "decays": _trap(_single(Decays), equal=_ONE),
    "initialises": _trap(Initialises, equal=_ONE),
    "rebinds": _trap(Rebinds, equal=_ONE),
    "rebinds by vector": _trap(RebindsByVector, equal=_ONE),
    "edits groups": _trap(_single(EditsGroups), equal=_ONE),
    "loads": _trap(Loads, equal=_ONE),
    "loads state": _trap(LoadsState, equal=_ONE),
    "halves": _trap(Halves),
    "manual": _trap(Manual, plans=("plain", "pp2"), reason=_PLAIN),
    "several": _trap(Several, plans=("plain", "pp2"), reason=_PLAIN),
    "gradients": _trap(callbacks=lambda: [Watch("on_before_optimizer_step")], equal=_ONE),
    "flat weights": _trap(callbacks=lambda: [FlatWeights()], equal=_ONE),
    "optimizer state": _trap(callbacks=lambda: [OptimizerState()], equal=_ONE),
    "alias": _trap(callbacks=lambda: [Alias()], equal=_ONE),
    "types": _trap(callbacks=lambda: [Types()], equal=_ONE),
}
"""A checkpoint that goes to plain bf16 and back is in ``tests/strategy/test_master_weights.py``."""

TRAPS |= {
    f"{name}, moved": replace(
        trap,
        module=_single(trap.module),
        has_masters=True,
        plans=_MOVED,
        equal=tuple(plan for plan in trap.equal if plan in _MOVED and name != "weights read"),
        tolerance=1e-6 if "clipped" in name else 1e-12,  # a norm is added up in another order
    )
    for name, trap in OFFLOADED.items()
    # A third of a loss is rounded to 16 bits by Lightning, and a third of its gradient is not here.
    if name not in ("gradient penalty", "sparse", "counting optimizer", "accumulated and clipped by value")
}
