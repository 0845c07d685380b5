"""What users give a strategy, looked at where it is given, and what it takes of Lightning's two copies."""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_mist.hardware import Cluster, MixedCluster
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.units import parse_bytes

DEFAULT_TIMEOUT = timedelta(minutes=30)

START_METHODS = ("popen", "spawn", "fork", "forkserver")

_FLAGS = (
    *("correct_profile", "self_check", "verbose", "dry_run", "save_distributed_checkpoint", "save_asynchronously"),
    *("master_weights", "gradient_as_bucket_view", "broadcast_buffers", "static_graph"),
)
_CHOICES = ("find_unused_parameters", "returns_loss")
_FILES, _FOLDERS = ("plan_path", "report_path"), ("profile_directory", "offload_directory")
_PATH = (str, os.PathLike)

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_FLAGS, ((bool,), "True or False is needed")),
    **dict.fromkeys(_CHOICES, ((bool, type(None)), "True, False or None is needed")),
    **dict.fromkeys(_FILES, ((*_PATH, type(None)), "the path of a file is needed, or None")),
    **dict.fromkeys(_FOLDERS, ((*_PATH, type(None)), "the path of a folder is needed, or None")),
    "plan": ((*_PATH, Plan), "'auto', the path of a plan file or a Plan is needed"),
    "search": ((SearchSpace, type(None)), "a SearchSpace is needed, or None for everything"),
    "cluster": (
        (str, Cluster, MixedCluster, type(None)),
        "text such as '2x8xL4' or a Cluster is needed, or None for this one",
    ),
    "blocks": ((str, type(None)), "the qualified name of a module is needed, such as 'model.layers', or None"),
    "data_parallel_size": ((int, type(None)), "a whole number is needed, or None"),
    "model_averaging_period": ((int, type(None)), "a whole number is needed, or None"),
    "process_group_backend": ((str, type(None)), "the name of a backend is needed, such as 'gloo', or None"),
    "timeout": ((timedelta, type(None)), "a timedelta is needed, such as timedelta(minutes=30)"),
    "start_method": ((str,), f"one of {', '.join(START_METHODS)} is needed"),
    "kwargs": ((dict,), "names and values are needed"),
}
"""Of which types an argument may be, and what is needed, in words."""


def _may_be_file(value: Any) -> bool:
    return bool(os.fspath(value)) and not Path(value).is_dir() and _may_be_folder(Path(value).parent)


def _may_be_folder(value: Any) -> bool:
    """Whether there is a folder of this name, or one could be made."""
    path = Path(value).absolute()
    return bool(os.fspath(value)) and next(there for there in (path, *path.parents) if there.exists()).is_dir()


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_FILES, (_may_be_file, "the path of a file in a folder is needed; leave it out for none")),
    **dict.fromkeys(_FOLDERS, (_may_be_folder, "the path of a folder is needed, where no file is; or leave it out")),
    "blocks": (bool, "the qualified name of a module is needed; leave it out to let blocks be found"),
    "data_parallel_size": (lambda value: value > 0, "at least 1 batch is loaded; give 1 or more, or None"),
    "model_averaging_period": (lambda value: value > 0, "models are averaged after 1 step at least; or leave it out"),
    "timeout": (lambda value: value > timedelta(), "it must be longer than 0 s, such as timedelta(minutes=30)"),
    "start_method": (START_METHODS.__contains__, f"choose one of {', '.join(START_METHODS)}"),
}
"""What must hold of a value that is not None, and what is said if it does not."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse values that no argument of a strategy takes.

    Args:
        given: All arguments by their names, further ones of torch's ``DistributedDataParallel`` under ``kwargs``.

    Raises:
        TypeError: If a value is of another type than its argument's, or a name is of no argument.
        ValueError: If a value breaks its argument's rule, or excludes another's.
    """
    for name, value in given.items():
        kinds, needed = _KINDS.get(name, ((object,), ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and object not in kinds):
            raise TypeError(f"{name} = {value!r:.60}: {needed}")
        holds, rule = _RULES.get(name, (None, ""))
        if holds is not None and value is not None and not holds(value):
            raise ValueError(f"{name} = {value!r:.60}: {rule}")
    if given.get("dry_run") and given["start_method"] != "popen":
        raise ValueError(
            f"dry_run=True with start_method={given['start_method']!r}: a process that ends would be waited for; leave "
            "start_method out"
        )
    if given.get("save_asynchronously") and not given["save_distributed_checkpoint"]:
        raise ValueError(
            "save_asynchronously=True with save_distributed_checkpoint=False: directories are written while training "
            "goes on; set both, or use Lightning's AsyncCheckpointIO for single files"
        )
    _check_further(given["kwargs"], [name for name in given if name not in ("self", "kwargs", "__class__")])


def _check_further(further: Mapping[str, Any], own: list[str]) -> None:
    """Refuse names that torch does not know either: nobody would ever read them."""
    known = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in _SET_BY_LIGHTNING]
    for name, value in further.items():
        if name not in known:
            near = get_close_matches(name, [*own, *known], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise TypeError(
                f"{name} = {value!r:.60}: neither the strategy nor torch's DistributedDataParallel has this argument; "
                + hint
            )


_SET_BY_LIGHTNING = ("module", "device_ids")


def with_words_of(own: type, other: type) -> str:
    """The docstring of a class, with another's words on arguments of its constructor that it does not describe."""
    (head, words), (_, others) = _described(own), _described(other)
    names = [name for name in inspect.signature(own.__init__).parameters if name != "self"]  # type: ignore[misc]
    # Python may have been told to leave docstrings out.
    return "\n".join([head, *filter(None, (words.get(name) or others.get(name) for name in names))])


def _described(cls: type) -> tuple[str, dict[str, str]]:
    """What a docstring says before its arguments, and of each of them."""
    head, title, text = (inspect.getdoc(cls) or "").partition("Args:\n")
    return head + title.strip(), {item[1]: item[0] for item in re.finditer(r" {4}\**(\w+): .*(?:\n {8}.*)*", text)}


def size_limit(name: str, value: str | int | float | None) -> int | None:
    """Bytes that an argument gives as a number or text, None for None.

    Raises:
        ValueError: If it is no size.
    """
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{name} = {value!r:.60}: {error}") from error


# Lightning comes as ``lightning.pytorch`` and as ``pytorch_lightning``: separate modules with separate classes ------

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Namespace:
    """What this package needs of one of Lightning's copies, ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""

    def __init__(self, root: str) -> None:
        def find(module: str, name: str) -> Any:
            return getattr(importlib.import_module(f"{root}.{module}"), name)

        self.is_param_in_hook_signature = find("utilities.signature_utils", "is_param_in_hook_signature")
        self.fitting = find("trainer.states", "TrainerFn").FITTING
        self.ends_quietly = find("utilities.exceptions", "_TunerExitException")
        self.set_sampler_epoch = importlib.import_module(f"{_FABRIC[root]}.utilities.data")._set_sampler_epoch


def refuse_unknown(given: Mapping[str, Any], *harmless: str) -> None:
    """Refuse what only later versions of Lightning pass, where it would have to be honoured here."""
    if unknown := sorted(given.keys() - {*harmless}):
        raise TypeError(
            f"Lightning passes {', '.join(unknown)}, of which this version of lightning-mist does not know what it is "
            "to change: take Lightning 2.6, or a later lightning-mist"
        )
