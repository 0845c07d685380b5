"""What a proof leaves for training: how parts compute, how their results are put together, and what to look out for."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.runtime.cutting.arguments import leaves_in
from lightning_mist.runtime.cutting.combination import Way
from lightning_mist.runtime.cutting.portable import bound_values
from lightning_mist.runtime.cutting.repairs import Count, Over, Patch, Whole
from lightning_mist.runtime.cutting.tape import Number
from lightning_mist.runtime.cutting.tape_replay import Slice, Values
from lightning_mist.runtime.cutting.traced_numbers import Ref, refs_of
from lightning_mist.tensors import batch_tensors

ResultKey = tuple[Hashable, ...]
"""``("loss",)``, ``("extra", name, ...)`` or ``("log", name, occurrence)``."""


ROWS = ("rows", "rows")
"""Stands for a slice by the number of a batch's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A call whose part of a batch computes something else."""

    key: tuple[Hashable, ...]
    patches: tuple[Patch, ...]
    line: str


Form = tuple[tuple[tuple[Any, Any], ...], tuple[Way | None, ...]]
"""What a call makes, by leaf, of what it is given of values that are put together from rows; see :func:`given_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRules:
    """How batches are cut.

    Attributes:
        slice: Works out what they need from a batch; None if they need nothing.
        seen: The ways in which each result of a batch may follow from those of its parts.
        known: Functions that may look across rows, with the places where they were seen.
        forms: What calls make of values put together from rows: by call, and all of them that are not mended by place.
        traced: Which of these values a result is.
        slices: From where to where first dimensions were sliced, where that leaves rows out or goes by their number.
        has_dropout: Whether parts draw other masks of dropout than the whole batch would.
    """

    sites: tuple[Site, ...] = ()
    slice: Slice | None = None
    seen: Mapping[ResultKey, frozenset[Way]] = field(default_factory=dict)
    results: Mapping[ResultKey, Way] = field(default_factory=dict)
    leaves: int = 0
    known: frozenset[Hashable] = frozenset()
    forms: Mapping[Hashable, tuple[Form, ...]] = field(default_factory=dict)
    traced: Mapping[ResultKey, Way] = field(default_factory=dict)
    slices: tuple[tuple[Any, Any], ...] = ()
    has_dropout: bool = False

    @property
    def site_text(self) -> str:
        """The calls that compute something else as text, equal on ranks that found the same."""
        return repr([(site.key, [_patch_text(patch) for patch in site.patches]) for site in self.sites])

    def bound_to(self, module: nn.Module) -> "CutRules":
        """The rules for the module that trains; they may have been found on a copy of it."""
        sites = tuple(with_weights(site, lambda weight: bound_values(weight, module)) for site in self.sites)
        if self.slice is None:
            return replace(self, sites=sites)
        entries = []
        for entry in self.slice.entries:
            args, kwargs = bound_values((entry.args, entry.kwargs), module)
            entries.append(replace(entry, args=args, kwargs=kwargs))
        return replace(self, sites=sites, slice=Slice(entries, self.slice.device))

    def measure(self, batch: Any, rows: int) -> Values | None:
        """What the sites need from a batch.

        Raises:
            TraceError: If the batch is not of the form that was looked at.
        """
        if self.slice is None:
            return None
        leaves = batch_tensors(batch)
        if len(leaves) != self.leaves:
            raise TraceError(
                f"a batch has {len(leaves)} tensors, and that which was looked at when the plan was made had "
                f"{self.leaves}: what its parts count cannot be known. Use a plan that does not cut batches: "
                "microbatch_size as large as the batch"
            )
        return self.slice.run(leaves, rows)


def with_weights(site: Site, change: Callable[[Any], Any]) -> Site:
    """A site with other weights in what it counts."""
    patches = (replace(p, weight=change(p.weight)) if isinstance(p, Count) else p for p in site.patches)
    return replace(site, patches=tuple(patches))


def given_to(args: Any, kwargs: Any, way_of: Callable[[Any], Way | None]) -> tuple[tuple[Any, Any], ...]:
    """How those arguments of a call follow that are put together from rows, by path, and how it puts rows together."""
    found = ((path, leaf if path == (1, "reduction") else way_of(leaf)) for path, leaf in leaves_in((args, kwargs)))
    return tuple((path, way) for path, way in found if way not in (None, "none"))


def _patch_text(patch: Patch) -> str:
    if isinstance(patch, Count):
        return f"count {patch.ignored}"
    if isinstance(patch, Over):
        return f"over {patch.path}"
    return f"whole {patch.path} {patch.way}"


def needed(sites: Sequence[Site]) -> list[Any]:
    """The tensors that sites need from a whole batch."""
    found: dict[Any, None] = {}
    for site in sites:
        for patch in site.patches:
            if isinstance(patch, Count):
                found.update(dict.fromkeys(patch.refs))
            elif isinstance(patch, Whole) and isinstance(patch.value, Ref):
                found[patch.value] = None
            elif isinstance(patch, Whole) and isinstance(patch.value, Number):
                found.update(dict.fromkeys(refs_of(patch.value.origin)))
    return list(found)
