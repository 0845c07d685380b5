"""Training on a part of a batch: its calls compute what was proved, and anything else ends training."""

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import occurrence, user_line
from lightning_mist.runtime.cutting.rules import (
    KEEPING,
    ROWS,
    Count,
    CutRules,
    Over,
    ResultKey,
    Site,
    Way,
    Whole,
    given_to,
    scaled,
    tolerance_of,
)
from lightning_mist.runtime.cutting.tape import Values, first_slice, made_by, rebuilt, takes_all, tensors_in
from lightning_mist.runtime.process_state import ACTIVE, quiet_in_blocks
from lightning_mist.tensors import batch_tensors, function_name

SUSPICIOUS = frozenset(
    (
        *("sum", "mean", "nanmean", "nansum", "max", "min", "amax", "amin", "logsumexp", "prod", "median", "quantile"),
        *("norm", "vector_norm", "matrix_norm", "std", "var", "std_mean", "var_mean", "normalize"),
        *("cumsum", "cumprod", "sort", "topk", "roll", "flip", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__"),
        *("__rmatmul__", "einsum", "tensordot", "dot", "cdist", "pdist", "cosine_similarity", "batch_norm"),
        *("instance_norm", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("kl_div", "ctc_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "triplet_margin_loss"),
        *("cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    )
)
"""Functions that may look at several rows at once."""

WAY_OUT = "Use a plan that does not cut batches: microbatch_size as large as the batch"


class CutMode(TorchFunctionMode):
    """Mends the calls of the user's step on a part of a batch, and ends training at calls that were not proved.

    Args:
        whole: What the sites need from the whole batch.
        first: Share of the batch's rows before the part.
        end: That up to its end.
        rows: Of the batch.
        own: Rows of the part, which is ``batch``; by default as many as its share.

    Attributes:
        counted: What means were taken over: of the part, of the whole, and where.
        wrong: Whether something counted other than was worked out from the batch, where the values are, and the line.
    """

    def __init__(
        self,
        rules: CutRules,
        whole: Values | None,
        part: Values | None,
        first: float,
        end: float,
        *,
        rows: int,
        batch: Any,
        own: int | None = None,
    ) -> None:
        super().__init__()
        self._rows, self._own = rows, round((end - first) * rows) if own is None else own
        # What has the part's rows, and the line of what would have fewer of the batch's.
        self._rowed: MutableMapping[Tensor, str] = WeakTensorKeyDictionary(dict.fromkeys(batch_tensors(batch), ""))
        self._behind = ""
        self._rules, self._whole, self._part = rules, whole, part
        self._first, self._end = first, end
        self._sites: Mapping[Hashable, Site] = {site.key: site for site in rules.sites}
        self._watched = SUSPICIOUS | {str(key[0]) for key in (*self._sites, *rules.forms)}  # type: ignore[index]
        self._ways: MutableMapping[Tensor, Way] = WeakTensorKeyDictionary()
        self._counts: dict[Hashable, int] = {}
        self.wrong: list[tuple[Tensor, str]] = []
        self.counted: dict[Hashable, tuple[Tensor, Tensor, str]] = {}
        self._is_quiet = False

    @property
    def is_quiet(self) -> bool:
        """Whether a block computes, which is not looked into."""
        return self._is_quiet

    @is_quiet.setter
    def is_quiet(self, value: bool) -> None:
        self._is_quiet = value
        if value:  # what lives now may be what the block is given
            self._behind = next(filter(None, self._rowed.values()), self._behind)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        is_watched = name in self._watched
        given = given_to(args, kwargs, self.way_of) if is_watched or self._ways else ()
        if self._is_quiet:
            return func(*args, **kwargs)
        if not (is_watched or given):
            output = func(*args, **kwargs)
            self._follow_rows(name, args, kwargs, output)
            return output
        key = occurrence(self._counts, name)
        site = self._sites.get(key)
        output = func(*args, **kwargs) if site is None else self._mended(site, func, args, kwargs)
        self._follow(name, key, given, made_by(name, args, output))
        self._follow_rows(name, args, kwargs, output)
        is_new = name in SUSPICIOUS and key[:2] not in self._rules.known
        if is_new and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            raise TraceError(
                f"{name} at {user_line()} was not part of the step when it was proved that its batches may be cut: a "
                f"term of the loss that begins later may look across rows. {WAY_OUT}"
            )
        return output

    def _follow(self, name: str, key: Any, given: tuple[tuple[Any, Any], ...], made: list[Tensor]) -> None:
        """Note which of the proved values a call makes; of what it did not make of them then, the line."""
        forms = self._rules.forms.get(key) or self._rules.forms.get(key[:2], ())
        ways = next((made_then for given_then, made_then in forms if given_then == given), None)
        if ways is None:
            is_kept = name in KEEPING and len(given) == 1 and given[0][0] == (0, 0)
            other = f"{name} at {user_line()}" if given or name in SUSPICIOUS else None
            ways = (given[0][1] if is_kept else other,) * len(made)
        for tensor, way in zip(made, ways, strict=False):
            self._ways.pop(tensor, None)
            if way is not None:
                self._ways[tensor] = way

    def _follow_rows(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Note what has the part's rows, and what takes all of them where the batch would leave some out."""
        lines = [line for tensor in tensors_in((args, kwargs)) if (line := self._line_of(tensor)) is not None]
        # What a block has made has a graph.
        if not lines and (name != "__getitem__" or args[0].grad_fn is None):
            return
        line = max(lines, default="")
        if not line and name == "__getitem__" and self._is_rowed(args[0]):
            ends, seen = first_slice(args[1]), self._rules.slices
            is_seen = ends is None or ends in seen or (ROWS in seen and takes_all(ends, self._own))
            if ends is not None and not is_seen and not takes_all(ends, self._rows):
                line = f"rows {ends[0] or 0} to {ends[1]} at {user_line()}"
        for tensor in made_by(name, args, output):
            if line or self._is_rowed(tensor):
                self._rowed[tensor] = line

    def _is_rowed(self, tensor: Tensor) -> bool:
        return bool(tensor.dim()) and tensor.shape[0] == self._own

    def _line_of(self, value: Any) -> str | None:
        return self._rowed.get(value) if isinstance(value, Tensor) else None

    def way_of(self, value: Any) -> Way | None:
        """Which of the proved values a tensor is: their way, a line for what was made otherwise, None for others."""
        return self._ways.get(value) if isinstance(value, Tensor) else None

    def expect(self, key: ResultKey, value: Any, text: str) -> None:
        """End training if a result is made otherwise than was proved.

        Raises:
            TraceError: Saying where, or how.
        """
        if fewer := self._behind or self._line_of(value):
            raise TraceError(
                f"{text} is made of some of the batch's rows ({fewer}), of which parts cannot know which they have: it "
                f"was made of all when it was proved that batches may be cut. {WAY_OUT}"
            )
        wanted, found = self._rules.traced.get(key), self.way_of(value)
        if found != wanted:
            raise TraceError(
                f"{text} is made otherwise than when it was proved that batches may be cut (it was {wanted}, and is "
                f"{found}): a term that begins later may count once for every part. {WAY_OUT}"
            )

    def _mended(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        def change(path: tuple[Any, ...], leaf: Any) -> Any:
            for patch in site.patches:
                if isinstance(patch, Whole) and patch.path == path:
                    return self._of_whole(site, patch, leaf)
                if isinstance(patch, Over) and patch.path == path:
                    return leaf / (self._end - self._first)
            return leaf

        if any(not isinstance(patch, Count) for patch in site.patches):
            args, kwargs = rebuilt((args, kwargs), change)
        output = func(*args, **kwargs)
        for patch in site.patches:
            if isinstance(patch, Count):
                output = self._counted(site, patch, args, kwargs, output)
        return output

    def _of_whole(self, site: Site, patch: Whole, actual: Any) -> Any:
        assert self._whole is not None
        assert self._part is not None
        whole, own = self._whole.leaf(patch.value), self._part.leaf(patch.value)
        if isinstance(own, Tensor):
            self._expect(own, actual, site.line)
        elif own not in (actual, 0):  # who counts nothing may divide by something else
            self.wrong.append((torch.ones((), dtype=torch.bool), site.line))
        if not isinstance(whole, Tensor) and whole == 0:
            return actual
        return patch.piece(whole, self._first, self._end)

    def _counted(self, site: Site, patch: Count, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        assert self._whole is not None
        assert self._part is not None
        own, whole = patch.of(self._part), patch.of(self._whole)
        if patch.ignored is not None:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor):
                self._expect(self._part[patch.source], target, site.line)
        self.counted[site.key] = (own, whole, site.line)
        return scaled(output, own, whole)

    def _expect(self, wanted: Tensor, actual: Any, line: str) -> None:
        if not isinstance(actual, Tensor) or actual.shape != wanted.shape:
            is_other = torch.ones((), dtype=torch.bool, device=wanted.device)
        elif wanted.dtype.is_floating_point:
            limit = tolerance_of(wanted.dtype)
            is_other = ~torch.isclose(actual, wanted, rtol=limit, atol=limit, equal_nan=True).all()
        else:
            is_other = (actual != wanted).any()
        self.wrong.append((is_other, line))


def copied(value: Any, copy: Any) -> None:
    """Let the mode that watches the step, if one does, know the copy of a tensor for what that was."""
    if not isinstance(mode := ACTIVE.mode, CutMode):
        return
    if (way := mode.way_of(value)) is not None:
        mode._ways[copy] = way
    if isinstance(copy, Tensor) and (line := mode._line_of(value)):
        mode._rowed[copy] = line


def check_counts(wrong: Sequence[tuple[Tensor, str]]) -> None:
    """End training if something counted other than was worked out from the batch.

    Raises:
        TraceError: Saying where.
    """
    lines = dict.fromkeys(line for flag, line in wrong if bool(flag))
    if lines:
        raise TraceError(
            f"the parts of a batch do not count what the batch was proved to count (at {', '.join(lines)}): the loss's "
            f"normaliser goes by more than the batch. {WAY_OUT}"
        )


@contextmanager
def cutting(mode: CutMode) -> Iterator[None]:
    """Inside, the user's step computes as a part of a batch must."""
    with quiet_in_blocks(mode), mode:
        yield
