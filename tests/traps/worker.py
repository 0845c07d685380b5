"""One rank of one fit of a trap; what it saw goes into a file."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_mist import MistStrategy
from lightning_mist.errors import MistError
from lightning_mist.leaves import plain_leaves
from lightning_mist.runtime.communication import failure
from lightning_mist.strategy.planning import plain_parallelism as simplest
from tests.fits import make_trainer
from tests.machine import assume_profile
from tests.traps.plain_masters import PlainMasters
from tests.traps.project import PLANS, Trap


class Losses(Callback):
    """Keeps every batch's loss, and whether training has begun."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.has_begun = False

    def on_train_batch_start(self, *_: Any) -> None:
        self.has_begun = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs is not None:
            self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def run(trap: Trap, plan: str, folder: Path) -> None:
    """Train a trap by the plan of that name, or with ``"ddp"``, and write what this rank saw or what went wrong."""
    torch.set_num_threads(1)
    failure.GRACE_SECONDS = 5.0
    losses = Losses()
    try:
        found = _fit(trap, plan, folder, losses)
    except BaseException as error:
        found = {
            "error": f"{type(error).__name__}: {error}",
            "is_ours": isinstance(error, MistError),
            "has_begun": losses.has_begun,
            "traceback": traceback.format_exc()[-3000:],
        }
        _write(folder, found)
        raise
    _write(folder, found)


def _write(folder: Path, found: dict[str, Any]) -> None:
    path = folder / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found))


def _fit(trap: Trap, plan: str, folder: Path, losses: Losses) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    if plan == "ddp":
        strategy: Any = PlainMasters() if trap.has_masters else "ddp_find_unused_parameters_true"
    else:
        if plan == "searched":
            simplest.LEAST_SECONDS = simplest.LEAST_SECONDS_OF_RUN = 0.0
        profiles = str(assume_profile(folder / "profiles", 2)) if PLANS[plan] == "auto" else str(folder / "profiles")
        strategy = MistStrategy(
            plan=PLANS[plan],
            profile_directory=profiles,
            plan_path=str(folder / "plan.json"),
            master_weights=trap.has_masters,
        )
    module, callbacks = trap.module(), trap.callbacks()
    defaults: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0 if trap.val is None else 1.0}
    if trap.has_masters and plan != "ddp":
        defaults["precision"] = "bf16-true"
    trainer = make_trainer(
        strategy, callbacks=[losses, *callbacks], default_root_dir=folder, **(defaults | dict(trap.trainer))
    )
    if trap.then[:1] != ("alone",):
        trainer.fit(module, trap.train(), None if trap.val is None else trap.val())
    later = {f"{number} {way}": _then(trap, way, trainer, module, folder) for number, way in enumerate(trap.then)}
    seen = {f"seen by {type(item).__name__}": item.seen for item in (module, *callbacks) if hasattr(item, "seen")}
    return {
        "losses": losses.losses,
        "steps": [trainer.global_step, trainer.current_epoch],
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "weights": {name: value.double().flatten().tolist() for name, value in module.state_dict().items()},
        "whole": None if plan == "ddp" else _whole(trap, trainer),
        **{name: [float(number) for number in values] for name, values in seen.items()},
        **later,
    }


def _whole(trap: Trap, trainer: Any) -> str | None:
    """Why ranks had the whole module in the last evaluation, if they had."""
    strategy = trainer.strategy
    is_outside = trap.then[-1:] not in ((), ("fit",), ("save",), ("go on",))
    is_without = is_outside and strategy._outside is None and strategy._whole is None
    return "there was no plan" if is_without else strategy._whole  # type: ignore[no-any-return]


def _then(trap: Trap, way: str, trainer: Any, module: Any, folder: Path) -> list[float]:
    """What one of the things that follow a fit gives."""
    saved = folder / "saved.ckpt"
    if way == "alone":
        return []
    assert trap.val is not None
    if way == "save":
        trainer.save_checkpoint(saved)
        return [] if trainer.global_rank else _numbers(torch.load(saved, weights_only=False)["optimizer_states"])
    if way == "fit":
        trainer.fit_loop.max_epochs += 1
        return _numbers(trainer.fit(module, trap.train(), trap.val()))
    if way == "go on":
        trainer.fit_loop.max_epochs += 1
        another = trap.module()
        trainer.fit(another, trap.train(), trap.val(), ckpt_path=saved)
        return _numbers(another.state_dict())
    if way == "test saved":
        return _numbers(trainer.test(trap.module(), trap.val(), ckpt_path=saved, verbose=False))
    if way == "test another":
        return _numbers(trainer.test(trap.module(), trap.val(), verbose=False))
    return _numbers(getattr(trainer, way)(module, trap.val()))


def _numbers(value: Any) -> list[float]:
    """All numbers in a nesting, in its order."""
    if isinstance(value, torch.Tensor):
        return [number for _, leaf in plain_leaves(value) for number in leaf.double().flatten().tolist()]
    if isinstance(value, dict):
        return [number for key in sorted(value, key=str) for number in _numbers(value[key])]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    return [float(value)] if isinstance(value, (bool, int, float)) else []
