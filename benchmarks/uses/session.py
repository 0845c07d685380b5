"""What a use of Lightning gets to work with, and what is kept of it to be compared."""

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mist import MistStrategy, Plan
from tests.traps.project import Project, loader

Plain = Any
"""Nestings of dictionaries and lists over numbers and texts."""

DOUBLE = 1e-9
SINGLE = 1e-5

LOGGED = 1e-6
"""Lightning keeps sums of what is logged in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One way to use Lightning.

    Attributes:
        theme: Under what heading.
        name: In words.
        run: Does it, on every rank.
        tolerance: Largest difference of numbers, relative to the largest beside it.
        said: Of a use that may give other values, by the same rules, what the plan says of it; empty of all others.
    """

    theme: str
    name: str
    run: Callable[["Session"], None]
    tolerance: float = DOUBLE
    said: str = ""

    @property
    def key(self) -> str:
        """Which it is of all."""
        return f"{self.theme}: {self.name}"


class Uses:
    """Collects the uses of a theme: a decorator for their functions."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.every: list[Use] = []

    def __call__(
        self, name: str, *, tolerance: float = DOUBLE, said: str = ""
    ) -> Callable[[Callable[["Session"], None]], Any]:
        """``@uses("on_step")`` above a function that takes a session."""

        def keep(run: Callable[["Session"], None]) -> Callable[["Session"], None]:
            self.every.append(Use(theme=self.theme, name=name, run=run, tolerance=tolerance, said=said))
            return run

        return keep


class Watch(Callback):
    """Keeps what training gives to every rank: losses and whatever else a step returns."""

    def __init__(self, session: "Session") -> None:
        self.session = session

    def on_train_batch_start(self, *_: Any) -> None:
        """Training has begun: what goes wrong from now on is no refusal of a plan."""
        self.session.has_begun = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One more batch."""
        self.session.keep("training batches", [[batch_idx, plain(outputs)]])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """One more batch."""
        self.session.keep("validation batches", [plain(outputs)])


class Session:
    """One use on one rank, under DDP or a plan.

    Args:
        plan: A plan, or None for DDP.
        folder: Of this rank's and its peer's files.
    """

    def __init__(self, plan: Plan | str | None, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.seen: dict[str, Any] = {}
        self.has_begun = False
        self.rank = int(os.environ["RANK"])

    def strategy(self) -> Any:
        """A new strategy; DDP's as it is when parameters may be unused, which plans find out."""
        if self.plan is None:
            return "ddp_find_unused_parameters_true"
        if self.plan == "auto":
            return "mist"
        return MistStrategy(plan=self.plan, plan_path=str(self.folder / "plan.json"))

    def trainer(self, *, callbacks: Any = (), **options: Any) -> Any:
        """A trainer with as little as possible beside what a use asks for."""
        defaults = {
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
        }
        if options.get("barebones"):
            defaults = {"max_epochs": 2}
        return pl.Trainer(
            strategy=self.strategy(),
            accelerator="cpu",
            devices=2,
            default_root_dir=self.folder,
            callbacks=[Watch(self), *callbacks],
            **(defaults | options),
        )

    def fit(
        self,
        module: Any = None,
        train: Any = None,
        val: Any = None,
        *,
        datamodule: Any = None,
        ckpt_path: Any = None,
        callbacks: Any = (),
        **options: Any,
    ) -> Any:
        """Train and keep what came of it; the trainer."""
        module = Project() if module is None else module
        trainer = self.trainer(callbacks=callbacks, **options)
        if datamodule is not None:
            trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
        else:
            trainer.fit(module, loader() if train is None else train, val, ckpt_path=ckpt_path)
        self.keep_state(trainer, module)
        return trainer

    def keep_state(self, trainer: Any, module: Any) -> None:
        """Metrics, counters, and all that the module holds."""
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            found = plain(getattr(trainer, name))
            self.keep("metrics", [[name, {key: value for key, value in found.items() if key != "v_num"}]])
        self.keep("steps", [[trainer.global_step, trainer.current_epoch]])
        self.keep("state", [plain(module.state_dict())])

    def keep(self, name: str, value: Any) -> None:
        """Keep something under a name: lists are joined."""
        value = plain(value)
        self.seen[name] = self.seen[name] + value if isinstance(self.seen.get(name), list) else value

    def keep_files(self) -> None:
        """What loggers and checkpoints wrote, on the rank that writes."""
        if self.rank:
            return
        for path in sorted(self.folder.rglob("metrics.csv")):
            with path.open(newline="") as file:
                self.seen[f"file {path.relative_to(self.folder)}"] = [
                    {key: number(text) for key, text in row.items()} for row in csv.DictReader(file)
                ]
        for path in sorted(self.folder.rglob("*.ckpt")):
            content = torch.load(path, weights_only=False)
            self.seen[f"file {path.relative_to(self.folder)}"] = plain(content, str(self.folder))


def number(text: str) -> float | str:
    """A cell of a file."""
    try:
        return float(text)
    except ValueError:
        return text


def plain(value: Any, folder: str = "\0") -> Plain:
    """Something as numbers and texts; paths in a folder as if they were anywhere."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype), "values": value.detach().double().tolist()}
    if isinstance(value, Mapping):
        return {str(key).replace(folder, ""): plain(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, folder) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, Path)):
        return str(value).replace(folder, "")
    return type(value).__name__


def difference(wanted: Plain, found: Plain, tolerance: float, where: str = "") -> str:
    """Where two nestings differ first by more than a tolerance, and how; empty if nowhere."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if wanted.keys() != found.keys():
            return f"{where}: {sorted(map(str, wanted.keys() ^ found.keys()))} are not in both"
        every = [(name, wanted[name], found[name]) for name in wanted]
    elif isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            return f"{where}: {len(found)} in place of {len(wanted)}"
        if wanted and all(is_number(item) for item in (*wanted, *found)):
            return _numbers_differ(wanted, found, tolerance, where)
        every = [(str(at), *pair) for at, pair in enumerate(zip(wanted, found, strict=True))]
    elif is_number(wanted) and is_number(found):
        return _numbers_differ([wanted], [found], tolerance, where)
    else:
        return "" if wanted == found else f"{where}: {str(found)[:80]} in place of {str(wanted)[:80]}"
    return next(filter(None, (difference(a, b, tolerance, f"{where} {name}".strip()) for name, a, b in every)), "")


def is_number(value: Any) -> bool:
    """Whether something is compared as one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_differ(wanted: list[float], found: list[float], tolerance: float, where: str) -> str:
    scale = max((abs(item) for item in wanted if math.isfinite(item)), default=0.0)
    for a, b in zip(wanted, found, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(scale, 1e-3):
            continue
        return f"{where}: {b:.8g} in place of {a:.8g}"
    return ""
