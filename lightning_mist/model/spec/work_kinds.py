"""Names of the kinds of work that operators do."""

from typing import Literal, get_args

OperatorKind = Literal[
    "matmul", "attention", "causal_attention", "convolution", "elementwise", "reduction", "index", "copy"
]
"""Kinds of operators.

* ``matmul``: matrix products, batched ones too.
* ``attention``: fused attention, which never writes scores; ``causal_attention`` skips those behind the diagonal,
  though torch's formulas count them as FLOPs.
* ``convolution``: convolutions.
* ``reduction``: what passes over rows to reduce them, and may write them again: norms, softmax, losses, sums, pooling.
* ``index``: look-ups by numbers, and their gradients: embeddings, gathering, scattering.
* ``copy``: copies, casts, concatenations, and filling.
* ``elementwise``: all others.
"""

KINDS: tuple[OperatorKind, ...] = get_args(OperatorKind)
"""All of them."""
