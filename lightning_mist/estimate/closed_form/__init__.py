"""Transformers by formulas of their sizes, where no trace can be made, and as a second opinion."""

from lightning_mist.estimate.closed_form.network_sizes import TransformerDims, dims_of
from lightning_mist.estimate.closed_form.transformer_estimate import (
    closed_spec,
    module_dims,
    shape_dims,
    with_second_opinion,
)
