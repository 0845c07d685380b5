"""Llama's and GPT's layers in plain torch with their sizes as data, and what a tensor-parallel rank's step keeps."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.estimate.closed_form.network_sizes import TransformerDims
from lightning_mist.model import derive_splits, map_module
from lightning_mist.model.device.operator_table import device_operators
from lightning_mist.model.fakes.fake_modules import quiet_fakes
from lightning_mist.model.fakes.isolate import isolated, substitute_parameters
from lightning_mist.model.trace.counted_step import Subject, count_step
from lightning_mist.model.trace.rank_step import RankView, present_parts
from lightning_mist.tensor_parallel import functions_of_wholes

LLAMA = TransformerDims(hidden=128, ffn=352, layers=2, heads=16, key_value_heads=8, vocabulary=96)
GPT = TransformerDims(
    hidden=128, ffn=512, layers=2, heads=16, vocabulary=96, norm="layer", feed_forward="gelu", rotary=False,
    query_key_value_bias=True, output_bias=True, feed_forward_bias=True, fused_query_key_value=True, positions=64,
)  # fmt: skip
LENGTH = 32


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Layer(nn.Module):
    def __init__(self, dims: TransformerDims) -> None:
        super().__init__()
        self.dims = dims
        make = nn.LayerNorm if dims.norm == "layer" else nn.RMSNorm
        self.norms = nn.ModuleList([make(dims.hidden), make(dims.hidden)])
        self.linear = nn.ModuleDict(
            {name: nn.Linear(inner, outer, bias=dims.bias_of(name)) for name, inner, outer in dims.matrices}
        )
        self.dropouts = nn.ModuleList([nn.Dropout(dims.dropout), nn.Dropout(dims.dropout)])

    def projections(self, x: Tensor) -> list[Tensor]:
        dims = self.dims
        if dims.fused_query_key_value:
            widths = [dims.query_width, dims.key_value_width, dims.key_value_width]
            parts = self.linear["query_key_value"](x).split(widths, dim=2)
        else:
            parts = [self.linear[name](x) for name in ("query", "key", "value")]
        width = dims.query_width // dims.heads
        return [part.view(*x.shape[:2], -1, width).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        dims = self.dims
        query, key, value = self.projections(self.norms[0](x))
        if tables is not None:
            query, key = (rotated(part, *tables) for part in (query, key))
        if dims.repeats_key_value:
            key, value = (part.repeat_interleave(dims.heads // dims.groups, dim=1) for part in (key, value))
        grouped = key.shape[1] != query.shape[1]
        dropout = dims.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        x = x + self.dropouts[0](self.linear["output"](y.transpose(1, 2).reshape(*x.shape[:2], -1)))
        return x + self.dropouts[1](self.linear["down"](self.inner(self.norms[1](x))))

    def inner(self, x: Tensor) -> Tensor:
        if self.dims.feed_forward == "swiglu":
            return F.silu(self.linear["gate"](x)) * self.linear["up"](x)
        return F.gelu(self.linear["up"](x))


class Transformer(nn.Module):
    def __init__(self, dims: TransformerDims, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.dims = dims
        self.tokens = nn.Embedding(dims.vocabulary, dims.hidden)
        self.positions = nn.Embedding(dims.positions, dims.hidden) if dims.positions else None
        self.dropout = nn.Dropout(dims.embedding_dropout)
        self.layers = nn.ModuleList([layer(dims) for _ in range(dims.layers)])
        self.norm = nn.LayerNorm(dims.hidden) if dims.norm == "layer" else nn.RMSNorm(dims.hidden)
        self.head = nn.Linear(dims.hidden, dims.vocabulary, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        x = self.dropout(x)
        tables = None
        if self.dims.rotary:
            width = self.dims.query_width // self.dims.heads
            angles = torch.arange(ids.shape[1])[:, None] * torch.arange(width)[None].float()
            tables = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, tables)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens(rows, length=LENGTH):
    return tuple(torch.zeros(rows, length, dtype=torch.long) for _ in range(2))


def step(module):
    return lambda batch: module.training_step(batch, 0)


def mapped(module, degrees=()):
    """What the package finds out of a module, and how it shares it out."""
    found = map_module(module, step(module), tokens(3), second_batch=tokens(2))
    return derive_splits(module, step(module), tokens(3), found, degrees)


def count(
    module,
    module_map,
    *,
    rows,
    length=LENGTH,
    degree=1,
    sequence=False,
    recompute=False,
    device="cpu",
    context=nullcontext,
):
    """One step of one rank on fakes, counted."""
    owners = {(name, at): regions for use in module_map.parameters for name, at, regions in use.slots if regions}
    view = RankView.of(module_map.split(degree), sequence_parallel=sequence) if degree > 1 else None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    operators = device_operators(device, "2.10.0").installed()
    with isolated(module), quiet_fakes(), functions_of_wholes(), operators:
        parameters = substitute_parameters(module, mode, owners)
        if view is not None:
            split = module_map.split(degree)
            parameters = present_parts(module, parameters, module_map, split, view.context, mode)
        subject = Subject(
            module=module,
            blocks=tuple(module.get_submodule(name) for name in module_map.blocks),
            parameters=parameters,
            mode=mode,
            call=step(module),
            context=context,
            view=view,
        )
        return count_step(
            subject, tokens(rows, length), twins=(None,) * len(module_map.blocks), recompute=recompute,
            gradients_exist=False,
        )  # fmt: skip
