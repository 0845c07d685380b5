"""The width of heads that attention's price depends on, as a trace sees it."""

import torch
from torch import nn

from lightning_mist.model import trace_model


class Attending(nn.Module):
    """One layer of attention, or none."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.project, self.heads = nn.Linear(64, 64), heads

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        found = self.project(batch)
        if self.heads:
            split = found.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            found = nn.functional.scaled_dot_product_attention(split, split, split, is_causal=True)
        return found.square().mean()


def test_attention_has_the_width_of_its_heads_and_nothing_else_has_one() -> None:
    batch = torch.zeros(2, 16, 64)
    for heads, width in ((4, 16), (2, 32), (0, 0)):
        spec = trace_model(Attending(heads), batch, device_kind="cuda")
        assert spec.head_width == width
        kinds = {item.kind for item in spec.head.forward_work}
        assert ("causal_attention" in kinds) == (heads > 0)
