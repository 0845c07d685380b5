"""What ranks do together before they train, which rank user code sees, and what rank 0 says."""

import pickle
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from torch import nn

from lightning_mist.attributes import replaced
from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap, ParameterUse
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.runtime.parameters import memory_of

T = TypeVar("T")


def _picklable(error: Exception) -> Exception:
    """The error, or, if it cannot travel to other processes, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
        same.__cause__ = error
        return same
    return error


def said_by_another(error: Exception) -> None:
    """Let this process end without printing an error that another rank prints."""
    before = sys.excepthook
    sys.excepthook = lambda kind, value, trace: None if value is error else before(kind, value, trace)


def of_all_ranks(value: T) -> list[T]:
    """What every rank has, by rank; called on all at once."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_rank_zero(work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result, or raise its error on every rank."""
    box: list[Any] = [everywhere(lambda: work() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(box, 0)
    return box[0]  # type: ignore[no-any-return]


def everywhere(work: Callable[[], T]) -> T:
    """Do something on every rank at once; if it fails on any, raise that rank's error on all of them."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as own:  # the others wait: whatever it is, they must hear of it
        error = _picklable(own)
    every = of_all_ranks(error)
    first = next((item for item in every if item is not None), None)
    if first is not None:
        mine = first if error is None else error
        if str(mine) in map(str, every[: dist.get_rank()]) or error is None:
            said_by_another(mine)
        raise mine
    return result[0]


def any_reason(mine: str | None) -> str | None:
    """The first rank's reason that has one; None if none has. Called on all at once."""
    return next((reason for reason in of_all_ranks(mine) if reason), None)


def same_start(module: nn.Module, later: Collection[str]) -> None:
    """Give every rank the values of rank 0, as DDP does when it wraps a module, less parameters that get them later."""
    parameters = [p for name, p in module.named_parameters() if name not in later]
    with torch.no_grad():
        for tensor in [*parameters, *module.buffers()]:
            # NCCL takes what lies together in memory only, which transposed parameters and expanded buffers do not.
            values = memory_of(tensor.detach())
            together = values.contiguous()
            dist.broadcast(together, 0)
            if together is not values:
                values.copy_(together)


def same_everywhere(found: ModuleMap) -> ModuleMap:
    """One map of what the ranks found of their module, each on a batch of its own; called on all at once.

    A parameter is used wherever any rank uses it, and what rules a plan out on one rank does so on all. Sizes stay
    those of each rank's batch.

    Raises:
        PlanError: On every rank, if ranks found different modules.
    """
    *cuts, tail = (tuple(replace(live, shape=(len(live.shape),)) for live in cut) for cut in (*found.cuts, found.tail))
    mine = replace(found, cuts=tuple(cuts), tail=tail, batch_rows=1)
    if len(set(of_all_ranks(blake2b(repr(mine).encode()).digest()))) == 1:
        return found
    every = of_all_ranks(mine)
    modules = [(one.blocks, [_joined((use,), ()) for use in one.parameters]) for one in every]
    different = [rank for rank, module in enumerate(modules) if module != modules[0]]
    if different:
        # An error in the step of one rank shows here first.
        firsts = {rank: next((item.reason for item in every[rank].exclusions), "") for rank in (0, different[0])}
        reasons = "".join(f". On rank {rank}: {reason}" for rank, reason in firsts.items() if reason)
        raise PlanError(
            f"ranks {different} see another module than rank 0 (parameters, or blocks that run, differ): every rank "
            f"must build the same one and call the same blocks; seed what is random in its construction{reasons}"
        )
    exclusions = dict.fromkeys(item for one in every for item in one.exclusions)
    if any(one.cuts != every[0].cuts for one in every):
        why = "other values cross between layers on one rank than on another: first batches take other branches"
        exclusions |= dict.fromkeys(exclusions_of([(why, ("pipeline", "tensor", "context"))]))
    if any(one.tail != every[0].tail for one in every):
        why = (
            "other values are used behind the last layer on one rank than on another: first batches take other branches"
        )
        exclusions |= dict.fromkeys(exclusions_of([(why, ("tail_chunks",))]))
    return replace(
        found,
        parameters=tuple(_joined(uses, uses) for uses in zip(*(one.parameters for one in every), strict=True)),
        leaking_blocks=tuple(sorted({position for one in every for position in one.leaking_blocks})),
        exclusions=tuple(exclusions),
        indexes_by_mask=any(one.indexes_by_mask for one in every),
        leaves_out=any(one.leaves_out for one in every),
        writes=max(one.writes for one in every),
        even_shards=all(one.even_shards for one in every),
        tokens=None if any(one.tokens is None for one in every) else found.tokens,
    )


def _joined(uses: Sequence[ParameterUse], counted: Sequence[ParameterUse]) -> ParameterUse:
    """A parameter, used in the regions where those that count use it."""
    regions = [{region for use in counted for region in use.slots[slot][2]} for slot in range(len(uses[0].slots))]
    slots = zip(uses[0].slots, regions, strict=True)
    return replace(uses[0], slots=tuple((*slot[:2], tuple(sorted(found))) for slot, found in slots))


class ActingRank:
    """Mixed into a strategy: the ranks that user code sees are those of the owner of the rows that it works on.

    Under plain data parallelism a step runs where its batch was loaded. Ranks that share batches run it for one
    another, so while they do, what Lightning says of the rank is said of the batch's owner.
    """

    num_processes: int
    _acting_rank: int | None = None

    @property
    def global_rank(self) -> int:
        """This rank, or whose rows the step sees."""
        return _super(self, "global_rank") if self._acting_rank is None else self._acting_rank

    @property
    def local_rank(self) -> int:
        """This rank within its node, or that of the owner of the rows that the step sees."""
        own = _super(self, "local_rank")
        return own if self._acting_rank is None else self._acting_rank % max(1, self.num_processes)

    @property
    def node_rank(self) -> int:
        """This rank's node, or that of the owner of the rows that the step sees."""
        own = _super(self, "node_rank")
        return own if self._acting_rank is None else self._acting_rank // max(1, self.num_processes)

    @property
    def root_device(self) -> torch.device:
        """Where this process computes, whosever rows the step sees: Lightning takes it by the local rank."""
        with replaced(self, _acting_rank=None):
            return super().root_device  # type: ignore[misc, no-any-return]

    def act_for(self, rank: int | None) -> None:
        """Speak for another rank from now on; ``None`` for this one again."""
        before, self._acting_rank = self._acting_rank, rank
        told = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
        if told is not None and before != rank:
            told.rank = self.global_rank


def _super(strategy: ActingRank, name: str) -> int:
    return int(getattr(super(ActingRank, strategy), name))


class Progress:
    """What rank 0 says while it plans and after it measured: lines and a progress bar on standard error.

    Other ranks keep silent, and without ``verbose`` it says only what users must know.
    """

    def __init__(self, *, enabled: bool, verbose: bool = True) -> None:
        self._is_enabled, self._is_verbose = enabled, verbose
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._last = ""

    @property
    def _console(self) -> Console:
        # Not kept: what refers to a strategy may be pickled, which an open stream cannot be.
        return Console(file=sys.stderr, quiet=not self._is_enabled, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        console = self._console
        if self._is_enabled and console.is_terminal:
            columns = (TextColumn("[bold]mist[/] {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        bar, self._bar, self._task = self._bar, None, None
        if bar is not None:
            bar.stop()

    def tell(self, text: str) -> None:
        """Print one line that users must know."""
        self._print(f"[bold]mist[/] {escape(text)}")

    def say(self, text: str) -> None:
        """Print one line of what is going on and why; without ``verbose`` only where it can be overwritten."""
        if self._is_verbose:
            self.tell(text)
        else:
            self.update(text, 0.0)

    def update(self, text: str, fraction: float) -> None:
        """Show how far a longer measurement has come; ``fraction`` lies in [0, 1]."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=1.0)
            self._bar.update(self._task, description=text, completed=fraction)
        elif self._is_verbose and text != self._last:
            self.tell(f"  {fraction:4.0%} {text}")
        self._last = text

    def details(self, renderable: Any) -> None:
        """Print a table or a text, if everything is to be said."""
        if self._is_verbose:
            self._print(renderable, markup=False)

    def conclude(self, line: str, table: Any) -> None:
        """Print a table if everything is to be said, else one line."""
        self.details(table)
        if not self._is_verbose:
            self.tell(line)

    def _print(self, renderable: Any, *, markup: bool = True) -> None:
        console = self._console if self._bar is None else self._bar.console
        console.print(renderable, markup=markup)
