"""What a fit asks of planning, and what it gets."""

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.hardware import USABLE_HOST_MEMORY, Cluster
from lightning_mist.hardware.detection import host_memory_bytes
from lightning_mist.model.user_code import Reach
from lightning_mist.plan import (
    Exclusion,
    Fingerprint,
    ModuleMap,
    Plan,
    SearchSpace,
    differences,
    from_json,
    load,
    save,
    to_json,
)
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.host_memory import HostPlace
from lightning_mist.strategy.given_arguments import size_limit
from lightning_mist.strategy.planning.local_machine import default_directory
from lightning_mist.strategy.ranks import on_rank_zero
from lightning_mist.tensors import leaves

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.strategy.profile_corrections import PlanBasis


def searched_with(search: SearchSpace | None, data_parallel_size: int | None) -> SearchSpace:
    """What is searched for so many loaders.

    Raises:
        ValueError: If the search space has its own, after which no loader is made.
    """
    search = search or SearchSpace()
    if search.data_parallel_size not in (None, data_parallel_size):
        raise ValueError(
            f"search.data_parallel_size = {search.data_parallel_size} and data_parallel_size = {data_parallel_size}: "
            "loaders are made before anything is searched; give it to the strategy, not to its search space"
        )
    return replace(search, data_parallel_size=data_parallel_size)


def given_plan(given: str | Plan) -> Plan:
    """A plan that the user gave, or its file, as rank 0 sees it; called on all ranks at once."""
    return from_json(on_rank_zero(lambda: to_json(given if isinstance(given, Plan) else load(Path(given)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the user asked for; see the arguments of the strategy."""

    plan: str | Plan
    memory_limit: int | None
    host_memory_limit: int | None
    offload_directory: str | None
    search: SearchSpace
    cluster: str | Cluster | None
    blocks: str | None
    plan_path: str | None
    profile_directory: str | None
    correct_profile: bool
    self_check: bool
    verbose: bool = False
    master_weights: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "PlanRequest":
        """What a strategy's arguments, by name, ask for; ``ValueError`` if they are no sizes, or do not go together."""
        asked = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        limits = {name: size_limit(name, given[name]) for name in ("memory_limit", "host_memory_limit")}
        search = searched_with(given["search"], given.get("data_parallel_size"))
        return cls(**{**asked, **limits, "search": search, "verbose": given["verbose"] or given.get("dry_run", False)})

    @property
    def loaders(self) -> int | None:
        """How many distinct batches are loaded at once, if not by every process its own."""
        return self.search.data_parallel_size

    def refuse_plain(self, reason: str | None) -> None:
        """Refuse to train plainly where ranks share loaders, or keep masters.

        Raises:
            PlanError: If there is a reason for plain data parallelism.
        """
        if reason is None:
            return
        if self.loaders is not None:
            raise PlanError(
                f"data_parallel_size = {self.loaders}: only plain data parallelism could train here ({reason}), under "
                "which every process loads its own batch; leave data_parallel_size out"
            )
        if self.master_weights:
            raise PlanError(
                f"master_weights=True: {reason}, so only torch's DistributedDataParallel could train this, which keeps "
                "no masters; change that, or use precision='bf16-mixed' without master_weights"
            )

    @property
    def host_limit(self) -> int | None:
        """Bytes of each node that what is offloaded may take; with a folder what is free where its files are to be.

        None for what plans use by default of the hosts' memory.
        """
        if self.offload_directory is None:
            return self.host_memory_limit
        folder = Path(self.offload_directory).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        return disk_usage(there).free

    @property
    def directory(self) -> Path:
        """Where measurements of machines and plans are kept."""
        return default_directory() if self.profile_directory is None else Path(self.profile_directory)

    def host_of_each(self, processes: int, device: torch.device) -> HostPlace:
        """Where each of a node's processes may keep what it offloads.

        Raises:
            PlanError: If there is to be a folder for what comes to a device.
        """
        if self.offload_directory is not None and device.type != "cpu":
            raise PlanError(
                f"offload_directory={self.offload_directory!r} with a {device.type} device: copies to it start from "
                "page-locked memory, which files have not; leave it out, and what is offloaded is in host memory"
            )
        limit, folder = self.host_memory_limit, self.offload_directory
        # Never more than the node has, or its control group.
        limit = int(USABLE_HOST_MEMORY * host_memory_bytes()) if limit is None else limit
        return HostPlace(budget=limit // processes, directory=None if folder is None else Path(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The step that is planned for.

    Attributes:
        name: Its name in the module.
        call: Runs it on a batch: returns a loss, or a dictionary with one.
        batch: Gives the batch to plan for, on every rank at once.
        at_once: Why nothing needs to be looked at, if so.
        restrictions: What this rank knows of the code around the step that rules plans out; asked once.
        hint: What to do if all processes load the same batch.
        records_metrics: Whether calls of the module's metrics may be made after the step.
        prepare: Does what comes before the step with a batch, for good; only in a copy of this process.
    """

    name: str
    call: Callable[[Any], Any]
    batch: Callable[[], Any]
    at_once: str | None
    restrictions: Callable[[], tuple[Exclusion, ...]] = tuple
    hint: str = ""
    records_metrics: bool = False
    prepare: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan of a fit, equal on every rank, what its engine needs, and what rank 0 knows of how it was made.

    Attributes:
        has_unused_parameters: Whether a trained parameter takes no part in the step.
        planning_seconds: Time from the first batch to the plan.
        plan_path: Where rank 0 wrote the plan, if it made one.
        basis: What the plan follows from, on rank 0, if it was made here.
        cached_at: Where rank 0 keeps the plan for later runs of the same question, if it made one.
        cache_place: Where plans of this question are kept, on every rank, if there are any.
        needs: The least ``memory_limit`` that the plan was to keep within, as far as that is known; None for plans that
            were not made here.
        replan: Makes another plan within so many bytes of each device for a batch, if this process is the only one.
        lack_for_whole: Why the whole module does not fit on every device for a validation, if so.
        records_metrics: Whether metrics of the module are updated where batches are loaded, whoever ran the step.
        signature: What this rank's batch looked like that the plan was made for.
    """

    plan: Plan
    module_map: ModuleMap
    has_unused_parameters: bool
    planning_seconds: float
    plan_path: Path | None
    estimate: "MemoryEstimate | None" = None
    basis: "PlanBasis | None" = None
    signature: Hashable = None
    cached_at: Path | None = None
    cache_place: Path | None = None
    needs: int | None = None
    replan: "Callable[[int, Any], Decision] | None" = None
    reach: Reach | None = None
    rules: CutRules | None = None
    records_metrics: bool = False
    lack_for_whole: str | None = None


# Plans that were made before: the same script asks once -----------------------------------------------------------

_STEP = 1.25
"""Sizes within a factor of this count as one: lengths of sequences differ from one shuffled epoch to the next."""

_PACKAGES = ("lightning-mist", "torch", "numpy", "highspy")


def cache_key(module: nn.Module, batch: Any, optimizers: Iterable[Any], others: Iterable[Any]) -> str:
    """What a plan is kept by: all that it follows from and that is known before anything is measured or tried.

    That is the network, its code, the batch, the optimizer, the versions of what computes, and others (the machine and
    the options), told apart by their ``repr``.
    """
    told = sha256()
    for line in _lines(module, batch, optimizers, others):
        told.update(line.encode() + b"\0")
    return told.hexdigest()[:32]


def _lines(module: nn.Module, batch: Any, optimizers: Iterable[Any], others: Iterable[Any]) -> Iterator[str]:
    classes: dict[type, None] = {}
    for name, child in module.named_modules():
        yield f"{name} {type(child).__module__}.{type(child).__qualname__} {child.extra_repr()} {child.training}"
        classes.update(dict.fromkeys(type(child).__mro__))
    for cls in classes:
        if cls.__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning", "builtins"):
            yield _source(cls)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.device.type}"
    names = [*map(str, batch)] if isinstance(batch, Mapping) else type(batch).__name__
    yield repr((names, [_size(leaf) for leaf in leaves(batch)]))
    for optimizer in optimizers:
        yield f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        for group in optimizer.param_groups:
            # Learning rates do not count: schedules change them.
            yield repr(
                [(k, len(v) if k == "params" else v if isinstance(v, bool) else type(v)) for k, v in group.items()]
            )
    yield from map(repr, others)
    for package in _PACKAGES:
        yield f"{package} {version(package)}"


def _source(cls: type) -> str:
    """A class's code, or where it cannot be read its name."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def _size(value: Any) -> Any:
    """The type of a batch's member; of a tensor also its rows exactly, and its other sizes roughly."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    # Nested ones have no shape in numbers.
    rows, *sizes = (value.size(0), value.numel()) if value.is_nested else (value.shape or (1,))
    return value.dtype, rows, tuple(round(math.log(max(size, 1), _STEP)) for size in sizes)


def cache_path(directory: Path, key: str) -> Path:
    """Where a plan is kept."""
    return directory / "plans" / f"{key}.json"


def cached_plan(path: Path, present: Fingerprint) -> tuple[Plan | None, str | None]:
    """A plan that was kept for what is present, or None; and why one that is there cannot be used, or None."""
    if not path.exists():
        return None, None
    try:
        plan = load(path)
        differing = differences(plan.fingerprint, present)
    except (OSError, PlanError, ValueError) as error:
        return None, f"the plan kept in {path} is not used: {error}"
    here = dict(present)
    if (str(plan.world_size), str(plan.num_layers)) != (here["world_size"], here["num_layers"]):
        differing += (f"it is for {plan.world_size} devices and {plan.num_layers} layers",)
    return (None, f"the plan kept in {path} is not used: {differing[0]}") if differing else (plan, None)


def remembered_limit(path: Path) -> int | None:
    """The ``memory_limit`` to plan with where the plan kept at a path ran out of memory; None if it did not."""
    try:
        limit = int(path.with_suffix(".limit").read_text())
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None


def remember_limit(path: Path, limit: int) -> None:
    """Plan with less memory from now on: the plan kept at a path, or to be kept there, ran out of it (OSError)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".limit").write_text(str(limit))
    path.unlink(missing_ok=True)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan, and the folders that are to hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(plan, path)
