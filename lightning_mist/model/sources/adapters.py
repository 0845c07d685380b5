"""Low-rank adapters beside the frozen layers of a network that is planned for."""

from collections.abc import Sequence

from torch import Tensor, nn

_ATTENTION = ("q_proj", "v_proj", "query", "value", "query_key_value", "qkv_proj", "Wqkv", "q_lin", "v_lin")
"""What adapters are put beside where nothing is said: queries and values, fused or not, as Hugging Face names them."""


class _Adapted(nn.Module):
    """A linear layer with a low-rank path beside it (LoRA; Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        dtype = base.weight.dtype
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as those of the layer."""
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def with_adapters(module: nn.Module, rank: int, targets: Sequence[str] = ()) -> nn.Module:
    """Freeze all of a module, and put a trained adapter beside each linear layer of some names; in place.

    Args:
        rank: Width of the adapters.
        targets: Last parts of the layers' names; by default those of queries and values in attention.

    Raises:
        ValueError: If the rank is not positive, or a name is that of no linear layer.
    """
    if rank < 1:
        raise ValueError(f"lora_rank = {rank}: the width of adapters must be positive; give 8 or 16")
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linear}
    chosen = set(targets or _ATTENTION) & known
    if missing := sorted(set(targets) - known) or (not chosen and ["attention's queries and values"]):
        raise ValueError(
            f"lora_targets: no linear layer is named {', '.join(missing)}; there are {', '.join(sorted(known))}"
        )
    module.requires_grad_(False)
    for name, layer in linear.items():
        parent, _, last = name.rpartition(".")
        if last in chosen:
            setattr(module.get_submodule(parent), last, _Adapted(layer, rank))
    return module
