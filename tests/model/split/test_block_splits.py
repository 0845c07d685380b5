import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mist.model.split.block_splits import in_a_type, probe
from lightning_mist.model.split.factored import MOST_BYTES

MOST = MOST_BYTES // (4 * 4)  # entries of 32 bits, of which a check holds four copies


def tried_in(entries, fails=()):
    seen = []

    def make(dtype):
        seen.append(dtype)
        if dtype in fails:
            raise RuntimeError(f"not in {dtype}")
        return dtype

    return in_a_type(entries, make, "it fails"), seen


def test_parts_are_checked_in_the_most_exact_numbers_that_there_is_memory_for():
    assert tried_in(2**24) == (torch.float64, [torch.float64])
    assert tried_in(2**24 + 1) == (torch.float32, [torch.float32])
    reason, seen = tried_in(MOST + 1)
    assert ("it could not be checked" in reason, seen) == (True, [])


def test_parts_that_fail_in_one_type_are_checked_in_another_and_the_first_reason_counts():
    both = [torch.float64, torch.float32]
    assert tried_in(1, fails=[torch.float64]) == (torch.float32, both)
    assert tried_in(1, fails=both) == ("it fails: RuntimeError: not in torch.float64", both)


def probed(block, *shape, **kwargs):
    x = torch.randn(*(shape or (2, 6, 16)), requires_grad=True)
    return probe(lambda: block(x, **kwargs), dict(block.named_parameters()), x)


def shares(found, degree):
    return {split.name: (split.dim, split.factors) for layers in found.layers(degree) for split in layers.splits}


class FeedForward(nn.Module):
    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention in all common layouts of one fused projection, with fewer heads of keys and values if asked."""

    def __init__(self, layout: str, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.layout, self.heads, self.key_heads, self.width = layout, heads, key_heads, 16 // heads
        self.qkv = nn.Linear(16, 16 + 2 * key_heads * self.width)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.qkv(x)
        if self.layout == "side by side":
            sizes = [16, self.key_heads * self.width, self.key_heads * self.width]
            q, k, v = (part.unflatten(2, (-1, self.width)) for part in y.split(sizes, 2))
        else:
            q, k, v = y.view(rows, length, self.heads, 3, self.width).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(z.transpose(1, 2).reshape(rows, length, -1))


def test_a_layer_after_elementwise_work_goes_by_inputs_and_the_one_before_by_outputs():
    assert shares(probed(FeedForward()), 2) == {
        "up.weight": (0, ((24, True),)),
        "up.bias": (0, ((24, True),)),
        "down.weight": (1, ((24, True),)),
    }


def test_a_degree_that_does_not_divide_the_inner_width_leaves_it_whole_and_is_said():
    found = probed(FeedForward(inner=20))
    assert shares(found, 3) == {}
    assert shares(found, 4)
    (note,) = found.why_whole(3)
    assert "down.weight and what feeds it stay whole: their 20 values fall into" in note
    assert note.endswith("groups (heads, for example), which 3 does not divide")


@pytest.mark.parametrize(
    ("layout", "factors"), [("side by side", ((3, False), (16, True))), ("head by head", ((48, True),))]
)
def test_a_fused_projection_is_shared_out_by_heads(layout, factors):
    found = shares(probed(Attention(layout)), 2)
    assert found["qkv.weight"] == found["qkv.bias"] == (0, factors)
    assert found["out.weight"] == (1, ((16, True),))
    assert "out.bias" not in found


def test_heads_that_a_degree_does_not_divide_stay_together():
    found = probed(Attention("head by head", heads=2, key_heads=2))
    assert shares(found, 2)
    assert shares(found, 4) == {}
    assert found.why_whole(4) == (
        "out.weight and what feeds it stay whole: their 16 values fall into 2 groups (heads, for example), "
        "which 4 does not divide",
    )


def test_parts_of_different_size_side_by_side_are_each_shared_out():
    found = probed(Attention("side by side", heads=4, key_heads=2))
    pieces = {split.name: split.pieces for layers in found.layers(2) for split in layers.splits}
    assert pieces == {"qkv.weight": (16, 8, 8), "qkv.bias": (16, 8, 8), "out.weight": ()}
    assert shares(found, 4) == {}
    assert "fall into 2 groups (heads, for example), which 4 does not divide" in found.why_whole(4)[0]


def test_parts_in_another_order_on_every_rank_cannot_be_named_and_stay_whole():
    class Mirrored(nn.Module):
        """The second half of what is packed is read backwards."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = self.qkv(x).split([16, 16, 16], -1)
            return self.out(torch.tanh(one) * two.flip(-1) + three)

    found = probed(Mirrored())
    assert shares(found, 2) == {}
    (note,) = found.why_whole(2)
    assert note.startswith(
        "out.weight and what feeds it stay whole: a rank would need parts of different sizes side by"
    )
    assert "qkv.weight" in note


def test_a_norm_between_two_layers_needs_everything():
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.norm(self.one(x)))

    found = probed(Between())
    assert found.layers(2) == ()
    assert found.why_whole(2) == ()


def test_a_layer_that_sees_the_blocks_input_itself_is_not_shared_out_along_it():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x + self.one(x))

    assert probed(Residual()).layers(2) == ()


def test_results_side_by_side_in_front_of_one_layer_are_each_shared_out():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Linear(16, 48), nn.Linear(48, 16)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.both(x).split([16, 32], -1)
            heads = gate.unflatten(-1, (4, 4)).softmax(-1).flatten(-2)
            return self.out(torch.cat([heads, F.gelu(up)], -1))

    found = shares(probed(Parallel()), 2)
    assert found["out.weight"][0] == 1
    assert found["both.weight"][0] == 0


def test_dead_rectifiers_do_not_hide_a_row():
    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)))

    found = shares(probed(Rectified(), 1, 2, 16), 2)
    assert found["up.weight"] == (0, ((64, True),))


class Adapted(nn.Module):
    """A feed-forward part with low-rank adapters at both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.up_a, self.up_b = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.down_a, self.down_b = nn.Linear(32, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x) + self.up_b(self.up_a(x)))
        return self.down(y) + self.down_b(self.down_a(y))


def test_adapters_follow_the_layers_that_they_adapt():
    found = probed(Adapted())
    assert shares(found, 2) == {
        "up.weight": (0, ((32, True),)),
        "up_b.weight": (0, ((32, True),)),
        "down.weight": (1, ((32, True),)),
        "down_a.weight": (1, ((32, True),)),
    }
    (layers,) = found.layers(2)
    assert layers.inner == ("down.weight", "down_a.weight")


def test_a_pair_that_is_too_small_to_be_worth_a_collective_stays_whole():
    class Tiny(FeedForward):
        def __init__(self) -> None:
            super().__init__(inner=128)
            self.small = FeedForward(inner=2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.small(x)

    assert set(shares(probed(Tiny()), 2)) == {"up.weight", "up.bias", "down.weight"}


def test_the_packed_projection_of_torchs_attention():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    found = shares(probed(layer), 4)
    assert found["self_attn.in_proj_weight"] == found["self_attn.in_proj_bias"] == (0, ((3, False), (16, True)))
    assert found["self_attn.out_proj.weight"] == (1, ((16, True),))
    assert found["linear1.weight"] == (0, ((32, True),))


def test_transposed_weights_as_in_gpt2():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Conv1D(32, 16), Conv1D(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(x)))

    assert shares(probed(Block()), 2) == {
        "up.weight": (1, ((32, True),)),
        "up.bias": (0, ((32, True),)),
        "down.weight": (0, ((32, True),)),
    }


def test_no_values_of_the_weights_are_needed():
    block = FeedForward()
    with torch.no_grad():
        for layer in (block.up, block.down):
            layer.weight.zero_()
    assert shares(probed(block), 2)


def test_a_linear_layer_alone_stays_whole_where_nobody_knows_what_its_block_transforms():
    block, x = nn.Linear(16, 16), torch.randn(2, 16, requires_grad=True)
    found = probe(lambda: block(x.relu()), dict(block.named_parameters()), None)
    assert list(found.layers(2)) == []
