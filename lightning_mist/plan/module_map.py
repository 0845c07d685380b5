"""What the runtime knows of a user's module: where it can be cut and which values cross.

A :class:`ModuleMap` is made by tracing the user's step once on fake tensors and is handed to the runtime as plain
data. Layer positions count repeated blocks in execution order. *Region* ``-1`` is what runs before the first block (the
head), region ``k`` is block ``k`` together with what runs between it and the next block; the last region includes the
tail.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, cast

from lightning_mist.errors import PlanError
from lightning_mist.plan.calls import describe_value
from lightning_mist.plan.stage_settings import OFFLOAD_KINDS, UPDATED_KINDS
from lightning_mist.plan.tensor_split import TensorSplit

Feature = Literal[
    "pipeline",
    "microbatches",
    "checkpointing",
    "selective_checkpointing",
    "tensor",
    "sequence",
    "context",
    "sharded_gradients",
    "sharded_parameters",
    "shards",
    "even_shards",
    "offloaded_parameters",
    "offloaded_gradients",
    "offloaded_optimizer",
    "offloaded_activations",
    "tail_chunks",
    "tail_tokens",
]
"""What an exclusion rules out: cutting into stages, cutting a batch, recomputing blocks, tensor parallelism, sequence
parallelism, context parallelism, leaving gradients or optimizer state to one rank each (every ZeRO stage from 1 on),
leaving parameters to one rank each (ZeRO-3), having parameters only while their layer computes (ZeRO-3 then treats the
module as one unit, and nothing is offloaded), updating pieces of parameters (whole ones are dealt out then), leaving a
kind of state to host memory, and running what is behind the last block on some rows, or some tokens, of a microbatch
after others.
"""

OFFLOADS: Mapping[str, Feature] = MappingProxyType(
    {
        kind: cast(Feature, f"offloaded_{kind}") if kind in UPDATED_KINDS else "offloaded_activations"
        for kind in OFFLOAD_KINDS
    }
)
"""By kind of state, what has it in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor that is defined before a cut and used after it.

    Attributes:
        key: Identity of the value, equal on every rank and in every step.
        requires_grad: Whether a gradient flows back through it.
        batch_dim: The dimension that grows with the batch, or ``None`` if none does.
        sequence_dim: The dimension along which sequence-parallel stages hold parts of it, or ``None`` if they hold it
            whole.
    """

    key: Hashable
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    batch_dim: int | None
    sequence_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """Where one parameter is held and used.

    Attributes:
        name: Its canonical (first) qualified name.
        slots: Every ``(module name, attribute name)`` that holds it, with the sorted regions that use it through this
            slot. A slot that no region uses belongs to the parameter's first other region, or to region -1.
    """

    name: str
    slots: tuple[tuple[str, str, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def regions(self) -> tuple[int, ...]:
        """Sorted regions that use the parameter through any slot."""
        return tuple(sorted({region for _, _, regions in self.slots for region in regions}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A feature that this module cannot have, and why, in words for the user."""

    feature: Feature
    reason: str


Reasons = Iterable[tuple[str, tuple[Feature, ...]]]
"""Why features of plans are ruled out, for people, and which."""


def exclusions_of(reasons: Reasons) -> tuple[Exclusion, ...]:
    """What some reasons rule out, each feature once for each."""
    found = dict.fromkeys((feature, reason) for reason, features in reasons for feature in features)
    return tuple(Exclusion(feature=feature, reason=reason) for feature, reason in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMap:
    """Blocks, cuts, parameters and exclusions of one step of one module.

    Attributes:
        blocks: Qualified names of the repeated blocks in execution order; empty if none were found.
        cuts: For each layer position ``k`` in ``1 .. len(blocks)-1``, at index ``k - 1``: the tensors alive on entry to
            block ``k``, in order of definition.
        tail: Those that what runs behind the last block is given.
        tokens: How many tokens a row of the batch has, if all of these have one place each for them behind the rows.
        lap: How many of the next chunk's tokens each chunk has as well, once it is proved that what runs behind the
            last block may take tokens in chunks: one where labels are shifted.
        leaking_blocks: Positions of blocks whose inner values are read from outside; they run on fakes when skipped.
        indexes_by_mask: Whether the step indexes values that depend on parameters by masks that do not.
        leaves_out: Whether a trained parameter would get no gradient from any one run of the step that was looked at.
        writes: Whether the step was ``"seen"`` to write into a parameter, ``"maybe"`` does unseen, or has no means to.
        splits: How the module may be split over tensor-parallel ranks, one entry per degree that was checked.
        unsplit: Degrees that were tried in vain, and why.
        contexts: How rows may be split over context-parallel ranks, one entry per degree that was checked; no
            parameters are.
        uncontexts: Degrees of these that were tried in vain, and why.
        drops: Whether the step was seen to drop something at random while that was found out.
        even_shards: Whether ranks may update pieces of parameters: the optimizer treats every entry by itself, and
            nobody else steps it or looks at its gradients.
    """

    step: str
    blocks: tuple[str, ...]
    cuts: tuple[tuple[LiveTensor, ...], ...]
    parameters: tuple[ParameterUse, ...]
    leaking_blocks: tuple[int, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    batch_rows: int = 1
    indexes_by_mask: bool = False
    leaves_out: bool = False
    writes: Literal["", "maybe", "seen"] = ""
    splits: tuple[TensorSplit, ...] = ()
    unsplit: tuple[tuple[int, str], ...] = ()
    contexts: tuple[TensorSplit, ...] = ()
    uncontexts: tuple[tuple[int, str], ...] = ()
    drops: bool = False
    even_shards: bool = False
    tail: tuple[LiveTensor, ...] = ()
    tokens: int | None = None
    lap: int | None = None

    def split(self, degree: int) -> TensorSplit:
        """How the module is split over ``degree`` tensor-parallel ranks."""
        if degree == 1:
            return TensorSplit(degree=1, parameters=())
        unknown = f"it was not shown that {degree} devices that share layers compute the same"
        why = "; ".join(self.excludes("tensor")) or dict(self.unsplit).get(degree, unknown)
        return _of_degree("tensor_parallel_degree", degree, self.splits, why)

    def context(self, degree: int) -> TensorSplit:
        """How rows are split over ``degree`` context-parallel ranks."""
        unknown = f"it was not shown that {degree} devices that share rows compute the same"
        why = "; ".join(self.excludes("context")) or dict(self.uncontexts).get(degree, unknown)
        return _of_degree("context_parallel_degree", degree, self.contexts, why)

    def excludes(self, feature: Feature) -> tuple[str, ...]:
        """The reasons for which a feature is ruled out; empty if it is allowed."""
        return tuple(dict.fromkeys(item.reason for item in self.exclusions if item.feature == feature))

    def excluding(self, reason: str, *features: Feature) -> "ModuleMap":
        """This map with features ruled out."""
        return replace(self, exclusions=(*self.exclusions, *exclusions_of([(reason, features)])))

    def excludes_offload(self, kind: str) -> tuple[str, ...]:
        """The reasons for which a kind of state has to stay on the device; empty if it may be offloaded."""
        return tuple(dict.fromkeys((*self.excludes("shards"), *self.excludes(OFFLOADS[kind]))))

    @property
    def cuts_tokens(self) -> bool:
        """Whether what runs behind the last block takes tokens in chunks, as far as is known, and not rows."""
        return self.tokens is not None and not self.excludes("tail_tokens")

    @property
    def whole_tail(self) -> tuple[str, ...]:
        """The reasons for which what runs behind the last block takes a microbatch whole; empty if parts will do."""
        features: tuple[Feature, ...] = ("pipeline", "tail_chunks")
        if self.cuts_tokens:
            return tuple(dict.fromkeys(reason for feature in features for reason in self.excludes(feature)))
        found = [reason for feature in (*features, "microbatches") for reason in self.excludes(feature)]
        found += [
            f"the {describe_value(live.key)} is of all rows and is used behind the last layer"
            for live in self.tail
            if live.requires_grad and live.batch_dim is None
        ]
        return tuple(dict.fromkeys(found))

    def with_tail_apart(self) -> "ModuleMap":
        """The map with what runs behind the last block as a region by itself, into which :attr:`tail` crosses."""
        last = len(self.blocks) - 1

        def moved(module_name: str, region: int) -> int:
            is_behind = region == last and not f"{module_name}.".startswith(f"{self.blocks[last]}.")
            return region + is_behind

        uses = tuple(
            replace(use, slots=tuple((of, name, tuple(moved(of, at) for at in here)) for of, name, here in use.slots))
            for use in self.parameters
        )
        return replace(self, cuts=(*self.cuts, self.tail), parameters=uses)

    @property
    def largest_zero_stage(self) -> int:
        """The highest ZeRO stage that is not ruled out."""
        if self.excludes("sharded_gradients"):
            return 0
        return 2 if self.excludes("sharded_parameters") else 3

    def owners(self, bounds: tuple[tuple[int, int], ...]) -> dict[str, tuple[int, ...]]:
        """For stages with these layer ranges, the sorted stages that hold each parameter."""
        return {
            use.name: tuple(sorted({self.stage_of(region, bounds) for region in use.regions or (self.home(use),)}))
            for use in self.parameters
        }

    def home(self, use: ParameterUse) -> int:
        """The region to which a parameter belongs that the traced step did not use.

        Another step may use it (a branch that not every batch takes): a parameter inside a block goes with the block,
        any other with the last region, whose stage sees the loss.
        """
        for position, block in enumerate(self.blocks):
            if any(f"{module_name}.".startswith(f"{block}.") for module_name, *_ in use.slots):
                return position
        return max(0, len(self.blocks) - 1)

    @staticmethod
    def stage_of(region: int, bounds: tuple[tuple[int, int], ...]) -> int:
        """The stage that runs a region, among stages with these layer ranges."""
        return next((index for index, (_, end) in enumerate(bounds) if region < end), len(bounds) - 1)


def _of_degree(name: str, degree: int, known: Sequence[TensorSplit], why: str) -> TensorSplit:
    """The split of a degree among the known ones, or an error that says why there is none."""
    for found in known:
        if found.degree == degree:
            return found
    others = " or ".join(str(each) for each in [1, *(found.degree for found in known)])
    raise PlanError(f"{name} = {degree}: {why}; use {name} = {others}")
