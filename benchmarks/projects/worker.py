"""One rank of a project: trains it and keeps what this rank saw.

Nothing of a project is touched. Losses are read off Lightning's loop of automatic optimisation, the rest off its
Trainer and module after each ``fit``.
"""

import argparse
import importlib
import importlib.util
import os
import pickle
from pathlib import Path
from time import time
from typing import Any

import torch

STARTED = "PROJECT_STARTED"
"""Variable with the time at which all processes were started."""


# torchvision's compiled operators are built for CUDA alone; its Python parts import where their names are known.
if torch.version.cuda is None:
    _TORCHVISION = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Seen:
    """What a rank saw of all ``fit`` calls.

    Attributes:
        values: Numbers and tensors by name.
        first_step_seconds: From the start of the processes to the end of the first step.
        plan: What the last fit was trained by, in words.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.first_step_seconds: float | None = None
        self.plan = ""
        self._steps = self._fits = 0

    def has_stepped(self, loss: Any) -> None:
        """Keep a step's loss."""
        if self.first_step_seconds is None:
            self.first_step_seconds = time() - float(os.environ[STARTED])
        self.values[f"loss of step {self._steps}"] = float("nan") if loss is None else float(loss)
        self._steps += 1

    def has_fitted(self, trainer: Any) -> None:
        """Keep what training left."""
        self._fits += 1
        plan = getattr(trainer.strategy, "plan", None)
        self.plan = "" if plan is None else "plain" if plan.is_plain else f"{plan.num_stages} stages"
        module = trainer.lightning_module
        for kind, found in (
            ("callback metric", trainer.callback_metrics),
            ("logged metric", trainer.logged_metrics),
            ("buffer", dict(module.named_buffers())),
            ("parameter", dict(module.named_parameters())),
        ):
            self.keep({f"{kind} {name} of fit {self._fits}": value for name, value in found.items()})

    def keep(self, found: dict[str, Any]) -> None:
        """Keep numbers and tensors."""
        for name, value in found.items():
            self.values[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def watch(package: str, seen: Seen) -> None:
    """Let the loop and the Trainer of one of Lightning's two packages tell what they see."""
    loop = importlib.import_module(f"{package}.loops.optimization.automatic")._AutomaticOptimization
    trainer = importlib.import_module(package).Trainer
    run, fit = loop.run, trainer.fit

    def observed_run(self: Any, *arguments: Any, **options: Any) -> Any:
        result = run(self, *arguments, **options)
        seen.has_stepped(result.get("loss"))
        return result

    def observed_fit(self: Any, *arguments: Any, **options: Any) -> Any:
        result = fit(self, *arguments, **options)
        seen.has_fitted(self)
        return result

    loop.run, trainer.fit = observed_run, observed_fit


def main() -> None:
    """Train and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", help="module.function")
    parser.add_argument("strategy")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    out = options.out.resolve()
    seen = Seen()
    watch("lightning.pytorch", seen)
    if importlib.util.find_spec("pytorch_lightning"):
        watch("pytorch_lightning", seen)
    module, _, name = options.project.partition(".")
    answer = getattr(importlib.import_module(f"benchmarks.projects.{module}"), name)(options.strategy)
    if answer is not None:
        seen.keep({"answer": torch.as_tensor(answer)})
    whole = {"values": seen.values, "seconds": seen.first_step_seconds, "plan": seen.plan}
    (out / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(whole))


if __name__ == "__main__":
    main()
