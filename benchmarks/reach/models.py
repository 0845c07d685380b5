"""Ordinary architectures in small: a module, how many blocks it repeats, and rows of data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo import LowRank

WORDS, WIDTH, LENGTH, ROWS, BATCH = 67, 32, 12, 24, 4
IGNORED = -100

Row = dict[str, Tensor]
Rows = list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of the field's architectures.

    Attributes:
        name: Its name.
        make: Makes the network; called with a row's tensors as keywords it gives a loss, or an output with one.
        rows: Makes the data, the same each time.
        blocks: How many layers a plan shares out.
    """

    name: str
    make: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    blocks: int = 4


class Training(pl.LightningModule):
    """Trains a network that knows its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.train()

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        """The network's loss."""
        found = self.network(**batch)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam would turn rounding, where a gradient is zero by symmetry, into steps."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def loader(rows: Rows) -> DataLoader[Row]:
    """Batches of so many rows for each rank."""
    return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


def _drawn(make: Callable[[torch.Generator], Row], count: int = ROWS) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return [make(generator) for _ in range(count)]


def _words(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (length,), generator=generator)


def _padded(generator: torch.Generator) -> Row:
    """Words, fewer in some rows than in others, with a mask."""
    length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
    mask = (torch.arange(LENGTH) < length).long()
    return {"input_ids": _words(generator) * mask, "attention_mask": mask}


def causal() -> Rows:
    """Padded rows whose padding has no label."""

    def make(generator: torch.Generator) -> Row:
        row = _padded(generator)
        return {**row, "labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, IGNORED)}

    return _drawn(make)


def full() -> Rows:
    """Rows of one length."""

    def make(generator: torch.Generator) -> Row:
        words = _words(generator)
        return {"input_ids": words, "labels": words}

    return _drawn(make)


def masked() -> Rows:
    """Padded rows of which a few words have labels."""

    def make(generator: torch.Generator) -> Row:
        row = _padded(generator)
        chosen = (torch.rand(LENGTH, generator=generator) < 0.4) & (row["attention_mask"] == 1)
        chosen[0] = True
        labels = torch.where(chosen, row["input_ids"], torch.tensor(IGNORED))
        return {**row, "input_ids": row["input_ids"].masked_fill(chosen, 2), "labels": labels}

    return _drawn(make)


def classes() -> Rows:
    """Padded rows with a class each."""
    return _drawn(lambda g: {**_padded(g), "labels": torch.randint(0, 3, (), generator=g)})


def sequences() -> Rows:
    """Padded sources, and padded targets."""

    def make(generator: torch.Generator) -> Row:
        target = _padded(generator)
        labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORED)
        return {**_padded(generator), "labels": labels}

    return _drawn(make)


def pictures(size: int = 16) -> Callable[[], Rows]:
    """Pictures with a class each."""

    def make(generator: torch.Generator) -> Row:
        pixels = torch.randn(3, size, size, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (), generator=generator)}

    return lambda: _drawn(make)


def _of(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers with a small configuration and no dropout."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        for name in vars(made):
            is_share = isinstance(getattr(made, name), float) and ("drop" in name)
            if is_share:
                setattr(made, name, 0.0)
        network: nn.Module = getattr(transformers, kind)(made)
        return network

    return make


_ENCODER = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
_ENCODER |= {"intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
_VISION |= {"image_size": 16, "patch_size": 4, "num_labels": 3}
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_MIXTURE |= {"experts_implementation": "batched_mm"}


def _adapted() -> nn.Module:
    """A frozen mixture of experts with adapters around its query and value projections."""
    network = _of("MixtralForCausalLM", "MixtralConfig", **_DECODER, **_MIXTURE)().requires_grad_(False)
    for name, module in list(network.named_modules()):
        if name.endswith("self_attn"):
            module.q_proj, module.v_proj = LowRank(module.q_proj), LowRank(module.v_proj)
    return network


class Level(nn.Module):
    """Two convolutions with group normalisation and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        found: Tensor = x + self.second(F.gelu(self.norm(self.first(x))))
        return found


class UNet(nn.Module):
    """Levels down and up again, each joined with its like (Ronneberger et al., 2015)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 1)
        self.down, self.up = (nn.ModuleList(Level(channels) for _ in range(2)) for _ in range(2))
        self.join = nn.ModuleList(nn.Conv2d(2 * channels, channels, 1) for _ in range(2))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Loss of giving the picture back, brighter by its class."""
        x, kept = self.enter(pixel_values), []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for level, join in zip(self.up, self.join, strict=True):
            x = level(join(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1)))
        return F.mse_loss(self.leave(x), pixel_values + labels[:, None, None, None])


class Mixer(nn.Module):
    """Perceptrons over places and over channels by turns (Tolstikhin et al., 2021)."""

    class Block(nn.Module):
        """One turn of each."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            """Same shape."""
            x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            found: Tensor = x + self.channels(self.norms[1](x))
            return found

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.ModuleList(Mixer.Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Loss of the class."""
        x = self.enter(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.leave(x.mean(1)), labels)


_T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
_BART = {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_BART |= {"max_position_embeddings": 32, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "bos_token_id": 1}
_GPT2 |= {"eos_token_id": 2}
_DISTIL = {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "num_labels": 3}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_OPT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 64}
_OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": WIDTH, "pad_token_id": 0}

ARCHITECTURES = (
    Architecture(
        name="BERT, classes",
        make=_of("BertForSequenceClassification", "BertConfig", **_ENCODER, num_labels=3),
        rows=classes,
    ),
    Architecture(
        name="RoBERTa, masked words", make=_of("RobertaForMaskedLM", "RobertaConfig", **_ENCODER), rows=masked
    ),
    Architecture(
        name="DistilBERT, classes",
        make=_of("DistilBertForSequenceClassification", "DistilBertConfig", **_DISTIL),
        rows=classes,
    ),
    Architecture(
        name="ELECTRA, classes",
        make=_of("ElectraForSequenceClassification", "ElectraConfig", **_ENCODER, embedding_size=WIDTH, num_labels=3),
        rows=classes,
    ),
    Architecture(
        name="DeBERTa-v2, masked words", make=_of("DebertaV2ForMaskedLM", "DebertaV2Config", **_ENCODER), rows=masked
    ),
    Architecture(name="GPT-2, padded", make=_of("GPT2LMHeadModel", "GPT2Config", **_GPT2), rows=causal),
    Architecture(name="GPT-NeoX", make=_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **_ENCODER), rows=full),
    Architecture(name="OPT, padded", make=_of("OPTForCausalLM", "OPTConfig", **_OPT), rows=causal),
    Architecture(name="Llama, padded", make=_of("LlamaForCausalLM", "LlamaConfig", **_DECODER), rows=causal),
    Architecture(name="Qwen2, padded", make=_of("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), rows=causal),
    Architecture(name="Mistral, padded", make=_of("MistralForCausalLM", "MistralConfig", **_DECODER), rows=causal),
    Architecture(name="Gemma", make=_of("GemmaForCausalLM", "GemmaConfig", **_DECODER, head_dim=8), rows=full),
    Architecture(name="Phi", make=_of("PhiForCausalLM", "PhiConfig", **_DECODER), rows=full),
    Architecture(name="Mixtral, LoRA, padded", make=_adapted, rows=causal),
    Architecture(name="T5", make=_of("T5ForConditionalGeneration", "T5Config", **_T5), rows=sequences),
    Architecture(name="BART", make=_of("BartForConditionalGeneration", "BartConfig", **_BART), rows=sequences),
    Architecture(name="ViT", make=_of("ViTForImageClassification", "ViTConfig", **_VISION), rows=pictures()),
    Architecture(name="DeiT", make=_of("DeiTForImageClassification", "DeiTConfig", **_VISION), rows=pictures()),
    Architecture(name="BEiT", make=_of("BeitForImageClassification", "BeitConfig", **_VISION), rows=pictures()),
    Architecture(
        name="Swin", make=_of("SwinForImageClassification", "SwinConfig", **_SWIN, num_labels=3), rows=pictures()
    ),
    Architecture(name="MLP-Mixer", make=Mixer, rows=pictures()),
    Architecture(name="U-Net", make=UNet, rows=pictures()),
)
