"""What kind of work an operator does, as far as a device does different kinds at different rates."""

from functools import cache
from typing import Any

from torch.utils.flop_counter import flop_registry

from lightning_mist.model.spec import OperatorKind

_INDEX = (
    "embedding", "_embedding_bag", "index", "_index_put_impl", "_unsafe_index", "gather", "scatter", "take",
    "masked_select", "masked_scatter", "one_hot", "nonzero",
)  # fmt: skip
_COPY = (
    "copy", "_to_copy", "clone", "contiguous", "cat", "stack", "repeat", "fill", "zero", "zeros", "ones", "full",
    "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "slice_backward", "slice_scatter",
    "select_backward", "select_scatter", "as_strided_scatter", "unfold_backward", "constant_pad_nd", "roll", "flip",
    "tril", "triu", "split_with_sizes_copy", "_foreach_copy", "_foreach_zero",
)  # fmt: skip
_REDUCTION = (
    "sum", "mean", "amax", "amin", "max", "min", "aminmax", "prod", "var", "std", "var_mean", "std_mean", "any", "all",
    "argmax", "argmin", "topk", "sort", "cumsum", "cumprod", "logsumexp", "norm", "linalg_vector_norm", "_foreach_norm",
    "dot", "mv", "addmv", "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "bincount",
)  # fmt: skip
_NAMES: dict[str, OperatorKind] = {
    **dict.fromkeys(_INDEX, "index"),
    **dict.fromkeys(_COPY, "copy"),
    **dict.fromkeys(_REDUCTION, "reduction"),
}

_PARTS: tuple[tuple[str, OperatorKind], ...] = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("conv2d", "convolution"),
    ("normal", "elementwise"),  # random numbers, no norms
    ("embedding", "index"),
    ("index_", "index"),
    ("scatter_", "index"),
    ("_norm", "reduction"),
    ("softmax", "reduction"),
    ("nll_loss", "reduction"),
    ("_pool", "reduction"),
    ("linear_cross_entropy", "reduction"),
)
"""Parts of names that tell a whole family, forward and backward; looked for in this order."""


@cache
def _family(operator: Any) -> OperatorKind:
    name: str = operator._overloadpacket.__name__
    plain = name.removesuffix("_backward").rstrip("_")
    exact = _NAMES.get(name.rstrip("_")) or _NAMES.get(plain)
    if exact is not None:
        return exact
    for part, kind in _PARTS:
        if part in name:
            return kind
    return "matmul" if operator._overloadpacket in flop_registry else "elementwise"


@cache
def _causal_position(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def kind_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorKind:
    """The kind of an operator that computes."""
    kind = _family(operator)
    position = _causal_position(operator) if kind == "attention" else None
    if position is None:
        return kind
    causal = args[position] if position < len(args) else kwargs.get("is_causal", False)
    return "causal_attention" if causal else kind
