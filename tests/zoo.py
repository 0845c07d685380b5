"""Small unmodified models of many kinds, each with a ``training_step(batch, batch_idx)`` and a maker of batches.

``make(name)`` returns ``(module, make_batch)`` with ``make_batch(rows)``. ``PARITY`` lists the models that a pipeline
must train exactly; ``HAZARDS`` those that it must refuse, with a text that the refusal must contain.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 97
"""Odd, so that it cannot be shared out over ranks."""

EVEN = 100
"""A vocabulary that 2 and 4 ranks can share out; batches use the first 97 entries."""

WIDTH = 16

Batch = Any
MakeBatch = Callable[[int], Batch]


class Wrapped(nn.Module):
    """A transformers model whose output has a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def token_batch(rows: int) -> Batch:
    ids = torch.randint(2, VOCABULARY, (rows, 12))
    mask = torch.ones(rows, 12, dtype=torch.long)
    mask[-1, -3:] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def image_batch(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 7, (rows,))}


def xy_batch(rows: int) -> Batch:
    return {"x": torch.randn(rows, 8), "y": torch.randint(0, 3, (rows,))}


def sometimes_batch(rows: int) -> Batch:
    """With a mark, equal in all rows, that says whether this batch trains the parts that not every batch trains."""
    return {**xy_batch(rows), "extra": torch.full((rows,), bool(torch.rand(()) < 0.5))}


def pair_batch(rows: int) -> Batch:
    return torch.randint(0, VOCABULARY, (rows, 12)), torch.randint(0, VOCABULARY, (rows, 12))


def gpt2(layers: int = 4, dropout: float = 0.0, vocabulary: int = VOCABULARY, **config: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Wrapped(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary, n_positions=32, n_embd=32, n_layer=layers, n_head=4, resid_pdrop=dropout,
                embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, **config,
            )
        )
    )  # fmt: skip


def llama(layers: int = 4, tied: bool = False, vocabulary: int = VOCABULARY, **config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Wrapped(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
                pad_token_id=0, bos_token_id=0, eos_token_id=1, **config,
            )
        )
    )  # fmt: skip


def bert(layers: int = 4, dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Wrapped(
        BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
                intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    )  # fmt: skip


def vit(layers: int = 4) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return Wrapped(
        ViTForImageClassification(
            ViTConfig(
                hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, image_size=16,
                patch_size=4, num_channels=3, num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )
    )  # fmt: skip


def t5(layers: int = 3, dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return Wrapped(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4,
                dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0,
            )
        )
    )  # fmt: skip


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank path beside it (LoRA; Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def lora_llama(layers: int = 4) -> nn.Module:
    """A frozen Llama with adapters around its query and value projections, the only parameters that are trained."""
    wrapped = llama(layers).requires_grad_(False)
    for name, module in list(wrapped.named_modules()):
        if name.endswith("self_attn"):
            module.q_proj, module.v_proj = LowRank(module.q_proj), LowRank(module.v_proj)
    return wrapped


def phi3(layers: int = 4) -> nn.Module:
    """Query, fewer keys and values in one matrix; gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Wrapped(
        Phi3ForCausalLM(
            Phi3Config(
                vocab_size=EVEN, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
                num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
                original_max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=1,
                resid_pdrop=0.0, embd_pdrop=0.0,
            )
        )
    )  # fmt: skip


def falcon(layers: int = 4) -> nn.Module:
    """Query heads beside the key and the value that they share, group by group, as in Megatron and InternLM2."""
    from transformers import FalconConfig, FalconForCausalLM

    return Wrapped(
        FalconForCausalLM(
            FalconConfig(
                vocab_size=EVEN, hidden_size=32, num_hidden_layers=layers, num_attention_heads=8, num_kv_heads=4,
                new_decoder_architecture=True, hidden_dropout=0.0, attention_dropout=0.0, bias=True,
                bos_token_id=0, eos_token_id=1,
            )
        )
    )  # fmt: skip


def mixtral(layers: int = 4) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return Wrapped(
        MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
                output_router_logits=True, router_aux_loss_coef=0.1, max_position_embeddings=64, pad_token_id=0,
                experts_implementation="batched_mm",
            )
        )
    )  # fmt: skip


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return Wrapped(
        SwinForImageClassification(
            SwinConfig(
                image_size=16, patch_size=1, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=7,
                drop_path_rate=0.0,
            )
        )
    )  # fmt: skip


class LightningDemo(nn.Module):
    """Lightning's own demo transformer: an encoder, a decoder that reads its memory, a mask cached on first use."""

    def __init__(self) -> None:
        super().__init__()
        from lightning.pytorch.demos import Transformer

        self.model = Transformer(vocab_size=VOCABULARY, ninp=32, nhead=2, nhid=48, nlayers=2, dropout=0.0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self.model(inputs, target), target.view(-1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width, self.dropout = heads, width, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A small GPT as in nanoGPT, embedding and head tied."""

    def __init__(self, layers: int = 4, dropout: float = 0.0, tied: bool = True, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        width = 32
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(32, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(width, 4, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, index: Tensor, targets: Tensor) -> Tensor:
        position = torch.arange(0, index.size(1), dtype=torch.long, device=index.device)
        x = self.transformer.drop(self.transformer.wte(index) + self.transformer.wpe(position))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(*batch)


class ChunkedLoss(Nano):
    """Scores and loss of a few positions at a time, each made again in backward, in turn by either implementation."""

    CHUNK = 4
    recomputes_blocks = True

    def forward(self, index: Tensor, targets: Tensor) -> Tensor:
        position = torch.arange(0, index.size(1), dtype=torch.long, device=index.device)
        x = self.transformer.wte(index) + self.transformer.wpe(position)
        for number, block in enumerate(self.transformer.h):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 and self.recomputes_blocks else block(x)
        x, total = self.transformer.ln_f(x), x.new_zeros(())
        pairs = zip(x.split(self.CHUNK, 1), targets.split(self.CHUNK, 1), strict=True)
        for number, (part, wanted) in enumerate(pairs):
            total = total + checkpoint(self.part_of_loss, part, wanted, use_reentrant=bool(number % 2))
        return total / targets.numel()

    def part_of_loss(self, part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(part).flatten(0, 1), wanted.flatten(), reduction="sum")


class Encoder(nn.Module):
    """torch's own encoder with two masks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = self.embedding(batch["input_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        padding = torch.zeros(x.shape[:2], dtype=x.dtype)
        padding = padding.masked_fill(batch["attention_mask"] == 0, float("-inf"))
        y = self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=True)
        return F.cross_entropy(self.head(y).flatten(0, 1), batch["labels"].flatten())


def small_block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


class Plain(nn.Module):
    """Four small blocks between two linear layers: what most of the following vary."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return small_block()

    def loss(self, h: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(self.head(h), batch["y"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in self.blocks:
            h = block(h)
        return self.loss(h, batch)


class SkipConnections(Plain):
    """Values that skip several blocks, a parameter indexed in Python, a penalty on the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.7))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, skips = self.first(batch["x"]), []
        for index, block in enumerate(self.blocks):
            if index >= 2:
                h = h + skips.pop() * self.scale[index]
            h = block(h)
            if index < 2:
                skips.append(h)
        return self.loss(h, batch) + 1e-3 * self.first.weight.pow(2).sum()


class StateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, state: dict[str, Any]) -> tuple[dict[str, Any], tuple[Tensor]]:
        aux = state["aux"] + self.gate(h).pow(2).mean()
        h = h + torch.tanh(self.linear(h))
        return {"h": h, "state": {"aux": aux, "step": state["step"] + 1}}, (h.detach().mean(),)


class TupleDict(Plain):
    """Blocks that take and return dictionaries in tuples, with a counter."""

    def block(self) -> nn.Module:
        return StateBlock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, state = self.first(batch["x"]), {"aux": batch["x"].new_zeros(()), "step": 0}
        for block in self.blocks:
            output, _ = block(h, state)
            h, state = output["h"], output["state"]
        assert state["step"] == len(self.blocks)
        return self.loss(h, batch) + 0.1 * state["aux"]


class OuterGate(nn.Module):
    def __init__(self, outer: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear, self._outer = nn.Linear(WIDTH, WIDTH), [outer]

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h)) * self._outer[0]["gate"]


class Closure(Plain):
    """Blocks that read a tensor which is not an argument."""

    outer: dict[str, Tensor]

    def __init__(self) -> None:
        outer: dict[str, Tensor] = {}
        self.__dict__["outer"] = outer
        super().__init__()
        self.gate = nn.Linear(8, WIDTH)

    def block(self) -> nn.Module:
        return OuterGate(self.outer)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.outer["gate"] = torch.sigmoid(self.gate(batch["x"]))
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.outer.clear()


class TryExcept(Plain):
    """The loop stands in a try block; the step returns a dictionary."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        h = self.first(batch["x"])
        try:
            for block in self.blocks:
                h = block(h)
        except Exception:
            raise AssertionError("swallowed") from None
        with torch.no_grad():
            accuracy = (self.head(h).argmax(-1) == batch["y"]).float().mean()
        return {"loss": self.loss(h, batch), "accuracy": accuracy}


class InPlace(Plain):
    """In-place operators between blocks, on what crosses the cuts, and a loss that needs the first activation."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        first = self.first(batch["x"])
        h = first.clone()
        h += 1.0
        h[:, 0] = 0.0
        for index, block in enumerate(self.blocks):
            h = block(h) * (1 + 0.1 * index)
            h[:, :2] += 0.5
            h[:, 3] *= 2.0
            h = torch.cat([h[:, : WIDTH // 2], h[:, WIDTH // 2 :].flip(-1)], -1)
            h.mul_(0.9)
        return self.loss(h, batch) + 0.01 * first.pow(2).mean() + 0.01 * (h * first).mean()


class Preallocated(Plain):
    """Outputs of all blocks are written into one tensor that was made before."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        outputs = torch.zeros(len(self.blocks), *h.shape, dtype=h.dtype)
        for index, block in enumerate(self.blocks):
            h = block(h)
            outputs[index] = h
        return self.loss(outputs.mean(0) + h, batch)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


class CustomFunction(Plain):
    """A custom autograd function makes what crosses the cuts."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = first = self.first(batch["x"])
        for block in self.blocks:
            h = Product.apply(block(h), first)
        return self.loss(h, batch)


class UserCheckpoint(Plain):
    """The user checkpoints every block, in turn with either implementation."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for index, block in enumerate(self.blocks):
            h = checkpoint(block, h, use_reentrant=bool(index % 2))
        return self.loss(h, batch)


class BorrowedParameter(Plain):
    """A block's parameter is also used outside of it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        weight = self.blocks[2][1].weight
        return super().training_step(batch, batch_idx) + 0.1 * weight.pow(2).sum()


class Masked(Plain):
    """Rows are chosen by a mask from the batch, between blocks and after them; the loss is read."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        keep = batch["x"][:, 0] > batch["x"][:, 0].min()
        h = self.first(batch["x"])
        for block in self.blocks:
            h = block(h) + h[keep].mean(0) + torch.masked_select(h, keep[:, None]).mean()
            h[keep, 0] = 1.0
        loss = F.cross_entropy(self.head(h[keep]), batch["y"][keep])
        assert not loss.isnan()
        assert float(f"{loss:.3f}") > 0
        assert loss.item() > 0
        return loss


class MaskedRows(Plain):
    """Fewer rows than the batch has cross the cuts, depending on the data."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        keep = batch["x"][:, 0] > batch["x"][:, 0].min()
        return super().training_step({"x": batch["x"][keep], "y": batch["y"][keep]}, batch_idx)


class Noise(Plain):
    """Noise drawn before the blocks is the target after them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch["x"])
        h = self.first(F.dropout(batch["x"], 0.2) + noise)
        for block in self.blocks:
            h = F.dropout(block(h), 0.1)
        return self.loss(h, batch) + (h.mean(1) - noise.mean(1)).pow(2).mean()


class SometimesBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.adapter = small_block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, extra: Tensor) -> Tensor:
        y = self.always(h)
        return y + torch.tanh(self.adapter(h)) if bool(extra[0]) else y


class Sometimes(Plain):
    """Adapters in the blocks and a second head that only some batches use: they lack a gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.second_head = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return SometimesBlock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in self.blocks:
            h = block(h, batch["extra"])
        loss = self.loss(h, batch)
        if bool(batch["extra"][0]):
            loss = loss + 0.5 * F.cross_entropy(self.second_head(h), batch["y"])
        return loss


class Uneven(Plain):
    """Two classes of blocks in turn."""

    def __init__(self) -> None:
        super().__init__()
        for index in (1, 3):
            self.blocks[index] = WideBlock()


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(h)))


class BlocksAlone(Plain):
    """Nothing before the blocks or behind them has parameters."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        del self.first, self.head

    def block(self) -> nn.Module:
        return WideBlock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = F.pad(batch["x"], (0, WIDTH - batch["x"].shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(h[:, :3], batch["y"])


class Recurrent(Plain):
    """A recurrent layer before the blocks, whose weights it also keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.rnn(self.first(batch["x"]).unsqueeze(1).expand(-1, 3, -1))[0].mean(1)
        for block in self.blocks:
            h = block(h)
        return self.loss(h, batch)


class SequenceFirst(Plain):
    """The batch dimension is the second one."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"]).unsqueeze(0).expand(5, -1, -1)
        bias = self.head.weight.sum(0)
        for block in self.blocks:
            h = block(h) + bias
        return self.loss(h.mean(0), batch)


# -------------------------------------------------------------------------------------------------------------- hazards


class ResidualConvolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class BatchNormNetwork(nn.Module):
    """Batch normalisation in every block of one nn.Sequential."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        blocks = [ResidualConvolution(width) for _ in range(layers)]
        stem, tail = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()], [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.net = nn.Sequential(*stem, *blocks, *tail, nn.Linear(width, 7))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["pixel_values"]), batch["labels"])


class Peeking(Plain):
    """Reads a value between blocks and decides by it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in self.blocks:
            h = block(h)
            if h.norm().item() > 1e6:
                break
        return self.loss(h, batch)


class SharedBlock(Plain):
    """Calls one block again."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in (*self.blocks, self.blocks[0]):
            h = h + block(h)
        return self.loss(h, batch)


class RandomDrop(Plain):
    """Python's random decides which blocks run."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in self.blocks:
            if random.random() < 0.9:
                h = block(h)
        return self.loss(h, batch)


class TorchDrop(Plain):
    """torch's random numbers decide which blocks run."""

    probability = 0.1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h = self.first(batch["x"])
        for block in self.blocks:
            if torch.rand([]) < self.probability:
                continue
            h = block(h)
        return self.loss(h, batch)


class NoTorchDrop(TorchDrop):
    """The same with a probability of zero, as many library models have it by default."""

    probability = 0.0


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, int]:
        return h + torch.tanh(self.linear(h)), int(x.abs().sum() * 1000)


class FrozenNumber(Plain):
    """Blocks return Python numbers that depend on the batch."""

    def block(self) -> nn.Module:
        return CountingBlock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, total = self.first(batch["x"]), 0
        for block in self.blocks:
            h, count = block(h, batch["x"])
            total += count
        return self.loss(h, batch) * (1 + total % 7)


class Counter(Plain):
    """Keeps state on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(1.0)
        return loss


class SelfLoss(Plain):
    """Keeps its last loss as a number."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = loss.item()
        return loss


class Total(Plain):
    """Adds up its losses in a tensor, and counts them in another."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(()), torch.zeros(())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.total += loss.detach()
        self.count += 1
        return loss


class Metric(Plain):
    """Updates a metric."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.metric = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        return loss


class Collective(Plain):
    """Talks to other processes itself."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return loss


class ParameterWrite(Plain):
    """Clamps a parameter in the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return super().training_step(batch, batch_idx)


class Stray(Plain):
    """Holds a parameter in a list beside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [self.blocks[0][1].weight]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.extra[0].sum()


class BatchWrite(Plain):
    """Writes into its batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch["x"].mul_(0.5)
        return super().training_step(batch, batch_idx)


class Broken(Plain):
    """Fails."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise RuntimeError("no such column: price")


class NoBlocks(nn.Module):
    """A perceptron without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class TokenMean(Nano):
    """The mean over all tokens that count, which differ in number between rows."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, target = batch
        target = target.clone()
        target[0, 3:] = -1
        return self(inputs, target)


class Contrastive(Plain):
    """Every row is compared with every other one."""

    def loss(self, h: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(h @ h.T, torch.arange(len(h)))


_MODELS: dict[str, tuple[Callable[[], nn.Module], MakeBatch]] = {
    "gpt2": (gpt2, token_batch),
    "gpt2_eager": (lambda: gpt2(attn_implementation="eager"), token_batch),
    "gpt2_untied": (lambda: gpt2(tie_word_embeddings=False), token_batch),
    "gpt2_even": (lambda: gpt2(vocabulary=EVEN), token_batch),
    "gpt2_dropout": (lambda: gpt2(dropout=0.1), token_batch),
    "llama": (llama, token_batch),
    "llama_even": (lambda: llama(vocabulary=EVEN), token_batch),
    "llama_tied": (lambda: llama(tied=True), token_batch),
    "llama_hidden_states": (lambda: llama(output_hidden_states=True), token_batch),
    "lora_llama": (lora_llama, token_batch),
    "bert": (bert, token_batch),
    "vit": (vit, image_batch),
    "t5": (t5, token_batch),
    "phi3": (phi3, token_batch),
    "falcon": (falcon, token_batch),
    "mixtral": (mixtral, token_batch),
    "swin": (swin, image_batch),
    "demo": (LightningDemo, pair_batch),
    "nano": (Nano, pair_batch),
    "nano_even": (lambda: Nano(vocabulary=EVEN), pair_batch),
    "nano_wide": (lambda: Nano(layers=2, tied=False, vocabulary=514), pair_batch),
    "nano_dropout": (lambda: Nano(dropout=0.1), pair_batch),
    "chunked_loss": (lambda: ChunkedLoss(vocabulary=EVEN), pair_batch),
    "encoder": (Encoder, token_batch),
    "plain": (Plain, xy_batch),
    "skips": (SkipConnections, xy_batch),
    "tuple_dict": (TupleDict, xy_batch),
    "closure": (Closure, xy_batch),
    "try_except": (TryExcept, xy_batch),
    "in_place": (InPlace, xy_batch),
    "preallocated": (Preallocated, xy_batch),
    "custom_function": (CustomFunction, xy_batch),
    "user_checkpoint": (UserCheckpoint, xy_batch),
    "borrowed": (BorrowedParameter, xy_batch),
    "masked": (Masked, xy_batch),
    "noise": (Noise, xy_batch),
    "sometimes": (Sometimes, sometimes_batch),
    "uneven": (Uneven, xy_batch),
    "blocks_alone": (BlocksAlone, xy_batch),
    "recurrent": (Recurrent, xy_batch),
    "sequence_first": (SequenceFirst, xy_batch),
    "no_torch_drop": (NoTorchDrop, xy_batch),
    "batch_norm": (BatchNormNetwork, image_batch),
    "masked_rows": (MaskedRows, xy_batch),
    "peeking": (Peeking, xy_batch),
    "shared_block": (SharedBlock, xy_batch),
    "random_drop": (RandomDrop, xy_batch),
    "torch_drop": (TorchDrop, xy_batch),
    "frozen_number": (FrozenNumber, xy_batch),
    "counter": (Counter, xy_batch),
    "self_loss": (SelfLoss, xy_batch),
    "metric": (Metric, xy_batch),
    "total": (Total, xy_batch),
    "collective": (Collective, xy_batch),
    "parameter_write": (ParameterWrite, xy_batch),
    "stray": (Stray, xy_batch),
    "batch_write": (BatchWrite, xy_batch),
    "broken": (Broken, xy_batch),
    "no_blocks": (NoBlocks, xy_batch),
    "token_mean": (TokenMean, pair_batch),
    "contrastive": (Contrastive, xy_batch),
}

HAZARDS: dict[str, str] = {
    "masked_rows": r"with shapes \(3, 16\) and \(2, 16\) for 4 and 3 rows: no dimension follows the rows",
    "batch_norm": r"changes buffer net\.2\.norm\.\w+ of a BatchNorm2d",
    "peeking": r"\.item\(\) at .*zoo\.py:\d+ reads a value that depends on parameters between layers 0 and 1",
    "shared_block": r"block blocks\.0 is called more than once",
    "random_drop": r"draws from Python's random module",
    "torch_drop": r"__bool__\(\) at .*zoo\.py:\d+ reads a random number|blocks\.\d.* not called",
    "frozen_number": r"block blocks\.0 returns the Python value \d+ in one step and \d+ in another",
    "counter": r"changes the attribute seen of the module",
    "self_loss": r"changes the attribute last_loss of the module",
    "total": r"changes the attribute total of the module",
    "metric": r"updates the metric metric",
    "collective": r"process group|talks to other processes",
    "parameter_write": r"writes into parameter head\.weight",
    "stray": r"uses parameter blocks\.0\.1\.weight through a reference outside its module",
    "batch_write": r"writes into the tensors of its batch",
    "broken": r"cannot be traced: RuntimeError: no such column: price",
    "no_blocks": r"no repeated blocks were found",
}
"""Models that may not be pipelined, with a pattern of the reason."""

PARITY = tuple(
    name for name in _MODELS if name not in HAZARDS and name not in ("token_mean", "contrastive", "nano_wide")
)
"""Models that a pipeline must train exactly."""

TRANSFORMERS = frozenset(
    name
    for name in _MODELS
    if name.split("_")[0] in ("gpt2", "llama", "lora", "bert", "vit", "t5", "mixtral", "swin", "phi3", "falcon")
)
"""Models that need the transformers package."""


def make(name: str, *, seed: int = 0) -> tuple[nn.Module, MakeBatch]:
    """A fresh model in training mode with the same initial parameters each time, and its maker of batches."""
    build, make_batch = _MODELS[name]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    module = build().train()
    torch.set_rng_state(state)
    return module, make_batch


def loss_of(output: Any) -> Tensor:
    """The loss of what a step returned."""
    return output["loss"] if isinstance(output, dict) else output


def step(module: Any) -> Callable[[Any], Any]:
    """The training step as a function of a batch, which it may change."""
    return lambda batch: module.training_step(copy.copy(batch), 0)
