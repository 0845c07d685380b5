"""Checkpoints that are cut short, spoilt, another module's, another optimizer's or another version's."""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.small_fits import PLANS, Small, fit
from lightning_mist import MistStrategy
from tests.strategy.checkpoints.writing import write_directory

Change = Callable[[dict[str, Any]], Any]


def written(folder: Path) -> tuple[Path, Path]:
    """A file and a directory of one checkpoint, as a fit of two ranks under DDP has it."""
    module = Small()
    optimizer = module.configure_optimizers()
    module.predicted(torch.ones(2, 4, dtype=torch.float64)).mean().backward()
    optimizer.step()
    state, names = module.state_dict(), [name for name, _ in module.named_parameters()]
    meta = {"pytorch-lightning_version": "2.6.0", "epoch": 0, "global_step": 1, "loops": None, "lr_schedulers": []}
    torch.save({**meta, "state_dict": state, "optimizer_states": [optimizer.state_dict()]}, folder / "file.ckpt")
    whole = optimizer.state_dict()
    by_name = {
        "state": {names[index]: entry for index, entry in whole["state"].items()},
        "param_groups": [{**group, "params": names} for group in whole["param_groups"]],
    }
    halves = [{name: state[name] for name in half} for half in (names[:3], names[3:])]
    write_directory(
        folder / "directory.ckpt", [{"model": halves[0], "optimizer_0": by_name}, {"model": halves[1]}], meta
    )
    return folder / "file.ckpt", folder / "directory.ckpt"


def read(path: Path) -> None:
    """All that a strategy reads of a checkpoint for a module."""
    strategy, module = MistStrategy(), Small()
    strategy._lightning_module = module
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    checkpoint = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(checkpoint)
    for state in checkpoint["optimizer_states"]:
        _ = state if isinstance(state, dict) else state.read()
    assert {name: value.shape for name, value in module.state_dict().items()} == shapes


def spoilt_bytes(folder: Path, chance: random.Random, count: int) -> Iterator[tuple[str, Path]]:
    """What is wrong, and a checkpoint of which some bytes are missing or others."""
    file, directory = written(folder)
    number = 0
    for name in ("file.ckpt", *sorted(path.name for path in directory.iterdir())):
        is_file = name == "file.ckpt"
        content = (file if is_file else directory / name).read_bytes()
        family = "a file" if is_file else f"{name} of a directory"
        for _ in range(count):
            at = chance.randrange(len(content))
            length = chance.choice((1, 4, 24, 200))
            other = bytes(chance.randrange(256) for _ in range(length))
            for what, changed in (
                ("cut short", content[:at]),
                ("other bytes in", content[:at] + other + content[at + length :]),
                ("missing bytes in", content[:at] + content[at + length :]),
                ("more bytes in", content[:at] + other + content[at:]),
            ):
                number += 1
                path = folder / f"{number}.ckpt"
                if not is_file:
                    shutil.copytree(directory, path)
                (path if is_file else path / name).write_bytes(changed)
                yield f"{what} {family}", path


def _with(**values: Any) -> Change:
    return lambda content: {**content, **values}


def _without(name: str) -> Change:
    return lambda content: {key: value for key, value in content.items() if key != name}


def _weights(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    return lambda content: {**content, "state_dict": change(content["state_dict"])}


def _optimizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda content: {**content, "optimizer_states": [change(content["optimizer_states"][0])]}


CONTENTS: Mapping[str, Change] = {
    "without a version": _without("pytorch-lightning_version"),
    **{
        f"version {version!r}": _with(**{"pytorch-lightning_version": version})
        for version in ("0.7", "99.0.0", "", "x", 5)
    },
    **{
        f"without {name}": _without(name)
        for name in ("state_dict", "optimizer_states", "loops", "lr_schedulers", "epoch")
    },
    "weights that are no mapping": _with(state_dict=[1, 2]),
    "no weights": _weights(lambda state: {}),
    "a weight too few": _weights(lambda state: dict(list(state.items())[1:])),
    "a weight too many": _weights(lambda state: {**state, "other": torch.ones(3)}),
    "weights of another name": _weights(lambda state: {f"model.{name}": value for name, value in state.items()}),
    "weights of another shape": _weights(lambda state: {name: torch.ones(3, 3) for name in state}),
    "weights that are text": _weights(lambda state: dict.fromkeys(state, "x")),
    "weights that are None": _weights(dict.fromkeys),
    "weights of single precision": _weights(lambda state: {name: value.float() for name, value in state.items()}),
    "weights that are NaN": _weights(lambda state: {name: value * float("nan") for name, value in state.items()}),
    "no optimizer's state": _with(optimizer_states=[]),
    "two optimizers' state": lambda content: {**content, "optimizer_states": content["optimizer_states"] * 2},
    "an optimizer's state that is text": _with(optimizer_states=["x"]),
    "an optimizer's state that is empty": _optimizer(lambda state: {}),
    "an optimizer without groups": _optimizer(lambda state: {**state, "param_groups": []}),
    "an optimizer of two groups": _optimizer(lambda state: {**state, "param_groups": state["param_groups"] * 2}),
    "an optimizer of fewer parameters": _optimizer(
        lambda state: {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
    ),
    "an optimizer that has not stepped": _optimizer(lambda state: {**state, "state": {}}),
    "another optimizer": _optimizer(
        lambda state: {
            **state,
            "state": {key: {"momentum_buffer": entry["exp_avg"]} for key, entry in state["state"].items()},
        }
    ),
    "moments of another shape": _optimizer(
        lambda state: {
            **state,
            "state": {key: {**entry, "exp_avg": torch.ones(7)} for key, entry in state["state"].items()},
        }
    ),
    "moments of other parameters": _optimizer(
        lambda state: {**state, "state": {key + 50: entry for key, entry in state["state"].items()}}
    ),
}
"""What a file holds that is well written and wrong."""


def content_runs(folder: Path) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """What is wrong, what resumes from it by a plan, and what does under DDP."""
    file, _ = written(folder)
    for number, (name, change) in enumerate(CONTENTS.items()):
        path = folder / f"content-{number}.ckpt"
        torch.save(change(torch.load(file, weights_only=False)), path)
        plan = list(PLANS.values())[number % len(PLANS)]
        yield (
            name,
            lambda plan=plan, path=path: fit(lambda: MistStrategy(plan=plan), folder, resumes=path, max_epochs=2),
            lambda path=path: fit(lambda: "ddp", folder, resumes=path, max_epochs=2),
        )
