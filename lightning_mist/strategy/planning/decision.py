"""What a fit asks of planning, and what it gets."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import torch

from lightning_mist.errors import PlanError
from lightning_mist.hardware import USABLE_HOST_MEMORY, Cluster
from lightning_mist.hardware.detection import host_memory_bytes
from lightning_mist.model.user_code import Reach
from lightning_mist.plan import Exclusion, ModuleMap, Plan, SearchSpace, from_json, load, to_json
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.host_memory import HostPlace
from lightning_mist.strategy.all_ranks import on_rank_zero
from lightning_mist.strategy.given_arguments import size_limit
from lightning_mist.strategy.planning.local_machine import default_directory

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.strategy.monitoring import Basis


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

    def with_plan(self) -> "PlanRequest":
        """The same with the plan that a file holds, as rank 0 sees it; called on all ranks at once."""
        return self if self.plan == "auto" else replace(self, plan=given_plan(self.plan))

    def with_loaders(self, loaders: int | None) -> "PlanRequest":
        """The same for so many loaders, fewer than there are processes; None for one each."""
        return replace(self, search=replace(self.search, data_parallel_size=loaders))

    @property
    def loaders(self) -> int | None:
        """How many distinct batches are loaded at once, if not by every process its own."""
        return self.search.data_parallel_size

    def refuse_plain(self, reason: str | None) -> None:
        """Refuse to train plainly where ranks share loaders.

        Raises:
            PlanError: If there is a reason for plain data parallelism.
        """
        if reason is not None and self.loaders is not None:
            raise PlanError(
                f"data_parallel_size = {self.loaders}: only plain data parallelism could train here ({reason}), under "
                "which every process loads its own batch; leave data_parallel_size out"
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
    basis: "Basis | None" = None
    signature: Hashable = None
    cached_at: Path | None = None
    cache_place: Path | None = None
    needs: int | None = None
    replan: "Callable[[int, Any], Decision] | None" = None
    reach: Reach | None = None
    rules: CutRules | None = None
    records_metrics: bool = False
    lack_for_whole: str | None = None
