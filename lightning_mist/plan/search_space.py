"""What a user may say about the plans to look at."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args, get_origin, get_type_hints

from lightning_mist.plan import ScheduleName
from lightning_mist.plan.plan import SCHEDULES
from lightning_mist.plan.stage_settings import CHECKPOINTING_KINDS, OFFLOAD_KINDS, CheckpointingKind

OFFLOADED = ("parameters", "gradients", "optimizer", "activations")
"""Kinds of state that may be in host memory where no others are named."""

MOST_LAYERS = 2_000
"""Layers of a network that plans are searched for: tables grow with their square, and take 3 GB and minutes here."""

COUNTS = (
    "num_stages",
    "num_microbatches",
    "microbatch_sizes",
    "devices_per_stage",
    "data_parallel_degrees",
    "tensor_parallel_degrees",
)
"""Limits that are numbers of something, or ``None``."""

_NEEDED: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "whole numbers are"),
    float: ((int, float), "numbers are"),
    str: ((str,), "names are"),
    bool: ((bool,), "True or False is"),
}
"""Of which types a limit may be, or each of several, by its declaration, and what is needed, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Limits of the search for a plan. The defaults look at everything that can be priced.

    Several values are separated by commas on the command line.

    Attributes:
        max_stages: The most pipeline stages; by default as many as there are devices or layers. Under interleaved-1f1b
            all chunks of a group of devices count as one stage.
        num_stages: The numbers of stages to look at, such as 2,4; by default all up to max_stages.
        num_microbatches: The numbers of microbatches per batch, such as 64; by default all that the batch allows.
        microbatch_sizes: The numbers of rows that a device may compute on per microbatch, such as 1,2; by default all
            that the batch allows. Stages of one plan may differ.
        layer_cuts: Where stages begin, such as 12,24: the first layers of all stages but the first. This also settles
            the number of stages, and excludes chunks.
        equal_stages: Whether all stages must have equally many layers and devices.
        devices_per_stage: The numbers of devices that a stage may have, such as 8; by default every divisor of all
            devices. Stages of one plan may differ.
        zero_stages: Which ZeRO stages data-parallel ranks may use: 0 (nothing is sharded), 1 (optimizer state), 2 (also
            gradients), 3 (also parameters).
        shard_degrees: Over how many ranks ZeRO may shard, such as 8 for those of a node (hybrid sharding); by default
            over all ranks with the same parameters, which is tried in any case. The degree must divide their number.
            The search takes up to half as long again where stages lie in several nodes.
        data_parallel_degrees: How many devices of a stage may compute on different rows, such as 4; by default all that
            its devices and the batch allow. Stages of one plan may differ.
        tensor_parallel_degrees: How many devices may share every layer of a stage, 1 among them; by default every
            number that the module and a node allow. More than a node has only if you name them. Stages of one plan may
            differ.
        context_parallel_degrees: How many devices may share the tokens of every long row, such as 8; () for none. Such
            plans have stages that are all alike, without tensor parallelism and offload, and nothing is proven of them.
            By default none in training, where a check must first show that the module allows it. In forecasts of
            networks that are described by their sizes 2, 4 and 8, for rows of 32,768 tokens or more.
        data_parallel_size: How many distinct batches are loaded at once; by default one per device. If the devices do
            not divide the batch it is one for each copy of the pipeline. In training the strategy's option says it.
        sequence_parallel: Whether devices that share layers also share what lies between them along the sequence:
            always, never, or by default what is faster.
        checkpointing: Whether layers may be recomputed in backward to save memory.
        checkpointed_shares: Which shares of each stage's layers may be recomputed, fractions in [0, 1], such as 0,1 for
            none or all; by default any number of layers. Shares other than 1 exclude chunks.
        checkpointing_kinds: What of a layer may be recomputed: full (everything), or selective (all but matrix
            products, convolutions and attention, whose results are kept). Stages of one plan may differ. Both together
            take up to twice as long to search.
        tail_chunks: Into how many chunks a microbatch may be cut for what is behind the last layer, such as
            1,4,8: chunk after chunk runs forward and backward there, so that logits are never whole. By default 1. Four
            numbers take two to five times as long to search.
        offload: Which kinds of state may be in host memory: parameters, gradients, optimizer, activations; [] for none.
            Inputs of recomputed layers have the share of activations; with checkpoints named too they have their own,
            which takes up to three times as long to search. By default all but that, on devices with memory of their
            own whose rates of copies are known. In training on CPUs parameters and optimizer state may be in files, if
            the strategy has an offload_directory.
        offload_ratios: Which shares of these may be there, fractions in [0, 1]; 0 is always among them.
        schedules: Pipeline schedules to choose from. The search is exact for 1f1b and gpipe (which is never faster and
            keeps more). interleaved-1f1b and zb-h1 are tried on the pipelines that it finds.
        chunks: How many stages one group of devices may have under interleaved-1f1b. 4 leave a quarter of 1F1B's bubble
            (Narayanan et al., 2021, section 2.2.2). Each further one gains less and adds as many transfers.
        solver_seconds: The most processor seconds of the search. If they are used up the plan says how far from the
            best it may be.
    """

    max_stages: int | None = None
    num_stages: tuple[int, ...] | None = None
    num_microbatches: tuple[int, ...] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    layer_cuts: tuple[int, ...] | None = None
    equal_stages: bool = False
    devices_per_stage: tuple[int, ...] | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    shard_degrees: tuple[int, ...] = ()
    data_parallel_degrees: tuple[int, ...] | None = None
    tensor_parallel_degrees: tuple[int, ...] | None = None
    context_parallel_degrees: tuple[int, ...] | None = None
    data_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    checkpointing: bool = True
    checkpointed_shares: tuple[float, ...] | None = None
    checkpointing_kinds: tuple[CheckpointingKind, ...] = ("full",)
    tail_chunks: tuple[int, ...] = (1,)
    offload: tuple[str, ...] | None = None
    offload_ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "zb-h1")
    chunks: tuple[int, ...] = (2, 3, 4)
    solver_seconds: float = 60.0

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The kinds of state that are named in ``offload``; none of them where it is left to the devices."""
        return self.offload or ()

    def __post_init__(self) -> None:
        """Check each limit by itself."""
        for name, limit in _LIMITS.items():
            self._settle(name, *limit)
        if self.max_stages is not None and self.max_stages < 1:
            raise ValueError(f"max_stages={self.max_stages}: a plan has at least 1 stage; give 1 or more, or None")
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size}: at least 1 batch is loaded; give 1 or more, or None"
            )
        for name in COUNTS:
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(f"{name}={values}: give at least one number, each at least 1, or None for all")
        if not self.chunks or min(self.chunks) < 2:
            raise ValueError(f"chunks={self.chunks}: give numbers of at least 2 stages for each group of devices")
        if not self.tail_chunks or min(self.tail_chunks) < 1:
            raise ValueError(
                f"tail_chunks={self.tail_chunks}: give at least one number, each at least 1; 1 is for none"
            )
        self._check_cuts()
        self._check_shares()
        if not self.zero_stages or not set(self.zero_stages) <= {0, 1, 2, 3}:
            raise ValueError(f"zero_stages={self.zero_stages}: ZeRO has stages 0 to 3; give for example (0, 1, 2, 3)")
        self._check_sharing()
        if not self.checkpointing_kinds or not set(self.checkpointing_kinds) <= set(CHECKPOINTING_KINDS):
            raise ValueError(
                f"checkpointing_kinds={self.checkpointing_kinds}: give at least one; known are "
                f"{', '.join(CHECKPOINTING_KINDS)}"
            )
        if not self.schedules or not set(self.schedules) <= set(SCHEDULES):
            raise ValueError(f"schedules={self.schedules}: give at least one; known are {', '.join(SCHEDULES)}")
        if not self.solver_seconds > 0:
            raise ValueError(f"solver_seconds={self.solver_seconds}: some time is needed, for example 60")

    def _settle(self, name: str, kind: Any, is_several: bool, is_optional: bool) -> None:
        """Make a tuple of several values, so that search spaces can be told apart; refuse what is of another type."""
        value, (kinds, needed) = getattr(self, name), _NEEDED.get(kind, _NEEDED[str])
        if is_several and value is not None and not isinstance(value, tuple):
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError(f"{name}={value!r}: there may be several; give ({value!r},)")
            value = tuple(value)
            object.__setattr__(self, name, value)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            if not isinstance(item, kinds) or isinstance(item, bool) != (kinds == (bool,)):
                raise TypeError(f"{name}={value!r:.60}: {needed} needed in place of {item!r:.30}")
        if value is None and not is_optional:
            raise TypeError(f"{name}=None: {needed} needed; leave it out for what is usual")

    def _check_sharing(self) -> None:
        if self.shard_degrees and min(self.shard_degrees) < 2:
            raise ValueError(
                f"shard_degrees={self.shard_degrees}: one rank has nobody to share with; give numbers of at least 2, "
                "or () for all ranks with the same parameters only"
            )
        if self.context_parallel_degrees and min(self.context_parallel_degrees) < 2:
            raise ValueError(
                f"context_parallel_degrees={self.context_parallel_degrees}: at least 2 devices share a row; give such "
                "numbers, or () for none"
            )

    def _check_cuts(self) -> None:
        cuts = self.layer_cuts
        if cuts is None:
            return
        if any(later <= earlier for earlier, later in pairwise((0, *cuts))):
            raise ValueError(
                f"layer_cuts={cuts}: the first layers of the second and later stages, each at least 1 and more than "
                "the one before; give for example (12, 24) for three stages, or () for one"
            )
        if self.equal_stages:
            raise ValueError(f"equal_stages=True and layer_cuts={cuts}: cuts settle what stages have; leave one out")
        stages = len(cuts) + 1
        if stages > (self.max_stages or stages) or (self.num_stages is not None and stages not in self.num_stages):
            raise ValueError(
                f"layer_cuts={cuts} make {stages} stages, but max_stages={self.max_stages} and num_stages="
                f"{self.num_stages} do not allow that many: leave these out"
            )

    def _check_shares(self) -> None:
        if not set(self.offloaded) <= set(OFFLOAD_KINDS):
            raise ValueError(f"offload={self.offload}: of {', '.join(OFFLOAD_KINDS)}; give () to offload nothing")
        for name in ("offload_ratios", "checkpointed_shares"):
            values = getattr(self, name)
            if values is not None and (not values or not all(0.0 <= value <= 1.0 for value in values)):
                raise ValueError(f"{name}={values}: give at least one fraction in [0, 1], for example (0.0, 0.5, 1.0)")


def kind_of_limit(hint: Any) -> tuple[Any, bool, bool]:
    """Of a limit's type: what it is or each of several, whether there are several, and whether it may be ``None``."""
    is_optional = type(None) in get_args(hint)
    whole = get_args(hint)[0] if is_optional else hint
    is_several = get_origin(whole) is tuple
    return get_args(whole)[0] if is_several else whole, is_several, is_optional


_LIMITS = {name: kind_of_limit(hint) for name, hint in get_type_hints(SearchSpace).items()}
