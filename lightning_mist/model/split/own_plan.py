"""The tensor-parallel plan that some transformers models bring along, held against what was found.

A check for the reader, nothing follows from it: most models have none, and some of these plans gather more than needed.
"""

import re
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_mist.plan.tensor_split import ParameterSplit

_DIMS = {"colwise": 0, "rowwise": 1, "embedding_rowwise": 0}
"""The dimension of a weight of nn.Linear or nn.Embedding that a style shares out (transformers,
integrations/tensor_parallel.py)."""


def compare_with_own_plan(module: nn.Module, splits: Iterable[ParameterSplit]) -> str | None:
    """In how many weights the module's own plan agrees, None if it has none or names none of them."""
    own = dict(_own_plan(module))
    if not own:
        return None
    agreeing, differing = 0, []
    for split in splits:
        found = next((dim for pattern, dim in own.items() if re.fullmatch(pattern, split.name)), None)
        if found is None:
            continue
        if found == split.dim:
            agreeing += 1
        else:
            differing.append(split.name)
    if not differing:
        return f"agrees with the model's own plan (_tp_plan) in {agreeing} weights" if agreeing else None
    return f"differs from the model's own plan (_tp_plan) in {differing[0]}" + (
        f" and {len(differing) - 1} other weights, agrees in {agreeing}" if len(differing) > 1 else ""
    )


def _own_plan(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Patterns of weights' names, and the dimension that the plan shares out."""
    for name, child in module.named_modules():
        plan = getattr(child, "_tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            dim = next((dim for known, dim in _DIMS.items() if str(style).startswith(known)), None)
            if dim is not None:
                full = f"{name}.{pattern}" if name else pattern
                yield re.escape(full).replace(r"\*", "[^.]+") + r"\.weight", dim
