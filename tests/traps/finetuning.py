"""Frozen parts: adapters beside frozen layers, trained heads, and what is unfrozen later."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from torch import nn

from tests.traps.project import LAYERS, WIDTH, Project, Trap

ALL = ("plain", "halves", "checkpointed", "zero1", "zero2", "zero3", "cut", "pp2", "pp2cut", "tp2", "moved", "moved3")
ALL += ("movedpp",)
SOME = ("checkpointed", "zero1", "zero3", "pp2", "pp2cut", "tp2", "moved3")


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank path beside it (LoRA; Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class Adapted(Project):
    """All is frozen but adapters of some blocks."""

    adapted = range(LAYERS)

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for number in self.adapted:
            block = self.blocks[number]
            block.up, block.down = LowRank(block.up), LowRank(block.down)
        self.double()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([item for item in self.parameters() if item.requires_grad], lr=1e-2, eps=1e-3)


class AdaptedAbove(Adapted):
    """Nothing is trained in the first half: no gradient goes back there."""

    adapted = range(LAYERS // 2, LAYERS)


class AdaptedBelow(Adapted):
    """Nothing is trained in the second half: gradients pass through."""

    adapted = range(LAYERS // 2)


class AdaptedOnce(Adapted):
    adapted = range(1, 2)


class Probe(Adapted):
    """Only the head is trained."""

    adapted = range(0)

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(True)


class ProbeWithout(Probe):
    """Only the head is trained, and what is below runs without gradients."""

    def logits(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.hidden(batch)
        return self.head(hidden)


class HandsAll(Adapted):
    """The optimizer gets frozen parameters too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class InputsRequireGrad(Adapted):
    """As recomputation that is reentrant needs it: a hook makes the frozen embedding's output require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))


class SinglePrecisionBase(Adapted):
    """The base is kept in a smaller type than its adapters."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, LowRank):
                module.base_layer.float()
                module.forward = _cast.__get__(module)


def _cast(self: LowRank, x: torch.Tensor) -> torch.Tensor:
    return self.base_layer(x.float()).double() + 2.0 * self.lora_B(self.lora_A(x))


class AgainstReference(Adapted):
    """The loss has what the model says without its adapters (as preference optimisation has)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch)
        with torch.no_grad():
            adapted = [(block, block.up, block.down) for block in self.blocks]
            for block, up, down in adapted:
                block.up, block.down = up.base_layer, down.base_layer
            reference = self.logits(batch)
            for block, up, down in adapted:
                block.up, block.down = up, down
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + 0.1 * F.mse_loss(logits, reference)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class SavesAdapters(Callback):
    """Keeps all but adapters out of checkpoints, and looks at what is in one."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        path = trainer.default_root_dir + "/adapters.ckpt"
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=False)
        self.seen.append(len(state["state_dict"]))
        self.seen += [float(v.double().sum()) for v in state["state_dict"].values()]
        self.seen += [float(i) for i in state["optimizer_states"][0]["state"]]


class Backbone(Project):
    """All but the head is a backbone, which a callback freezes at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList([self.embed, self.blocks])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([item for item in self.parameters() if item.requires_grad], lr=1e-2, eps=1e-3)


class UnfreezesTop(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze([pl_module.embed, pl_module.blocks])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[-1], optimizer)


class UnfreezesByHand(Adapted):
    """A frozen block is trained from the second epoch on, and the optimizer has known it all the time."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)

    configure_optimizers = HandsAll.configure_optimizers


class AdapterAddedLate(Adapted):
    adapted = range(1, LAYERS)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[0].up = LowRank(self.blocks[0].up).double()
            self.trainer.optimizers[0].add_param_group(
                {"params": [item for item in self.blocks[0].parameters() if item.requires_grad]}
            )


class Unused(Adapted):
    """A trained adapter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 2, bias=False).double()


_WHOLE = "it changes the optimizer's parameters while training"

TRAPS = {
    "adapted": Trap(module=Adapted, plans=ALL, equal=ALL),
    "adapted above": Trap(module=AdaptedAbove, plans=ALL, equal=ALL),
    "adapted below": Trap(module=AdaptedBelow, plans=SOME, equal=SOME),
    "adapted once": Trap(module=AdaptedOnce, plans=SOME, equal=SOME),
    "probe": Trap(module=Probe, plans=SOME, equal=SOME),
    "probe without": Trap(module=ProbeWithout, plans=SOME, equal=SOME),
    "hands all": Trap(module=HandsAll, plans=SOME, equal=SOME),
    "inputs require grad": Trap(module=InputsRequireGrad, plans=SOME, equal=SOME),
    "single precision base": Trap(
        module=SinglePrecisionBase, plans=SOME, equal=tuple(set(SOME) - {"tp2"}), reason="same dtype"
    ),
    "against reference": Trap(
        module=AgainstReference, plans=("auto", "pp2"), equal=("auto",), reason="called more than once"
    ),
    "saves adapters": Trap(module=Adapted, callbacks=lambda: [SavesAdapters()], plans=SOME, equal=SOME),
    "backbone": Trap(
        module=Backbone,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)],
        plans=("auto", "plain", *SOME),
        equal=("auto", "plain"),
        reason=_WHOLE,
    ),
    "unfreezes top": Trap(
        module=Backbone,
        callbacks=lambda: [UnfreezesTop()],
        plans=("auto", "plain", *SOME),
        equal=("auto", "plain"),
        reason=_WHOLE,
    ),
    "unfreezes by hand": Trap(module=UnfreezesByHand, plans=("plain", *SOME), reason="blocks"),
    "adapter added late": Trap(module=AdapterAddedLate, plans=("plain", *SOME)),
    "unused": Trap(module=Unused, plans=("plain", *SOME)),
}
