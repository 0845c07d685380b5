"""What people fine-tune with, under plans and DDP: ``python -m benchmarks.uses.fine_tuning`` writes its record.

Adapters and weights of four bits of libraries, documents of any length, mixtures of experts, losses in chunks. They run
as uses do (``benchmarks.uses.run``), and cells are in the same words. Needs the extra ``compat``.
"""

import argparse
import itertools
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.reach.models import IGNORED, LENGTH, ROWS, WORDS, Training, full, loader
from benchmarks.record import make_record, write_record
from benchmarks.uses.run import GOOD, Cell, Work, rows_of
from benchmarks.uses.session import SINGLE, Session, Uses
from lightning_mist import Plan
from tests.fits import plan

DOUBLE = 1e-10
LIBRARIES = ("bitsandbytes", "peft", "transformers")
BATCH, WIDTH = 4, 64

themes = adapters, optimizers, rows, experts, losses = tuple(
    Uses(theme) for theme in ("adapters", "optimizer", "rows", "experts", "loss")
)

COLUMNS = {
    "auto": "auto",
    "ZeRO-1": "zero1",
    "ZeRO-3": "zero3",
    "pp 2": "pp2",
    "offloaded state": "movedstate",
    "recomputed": "checkpointed",
}
"""Columns of the table, and the plans."""

FLAT = "flattened by transformers"
"""The row whose batches are one row for torch, of all their documents."""


def plans_of(rows: int) -> dict[str, Plan | str]:
    """The plans for batches of so many rows, by name."""
    whole: Any = [(4, [0, 1])]
    return {
        "auto": "auto",
        "zero1": plan(whole, rows=rows, microbatches=1, zero=1),
        "zero3": plan(whole, rows=rows, microbatches=1, zero=3),
        "pp2": plan([(2, [1]), (2, [0])], rows=rows, microbatches=2),
        "movedstate": plan(whole, rows=rows, microbatches=1, zero=1, offload={"optimizer": 1.0}),
        "checkpointed": plan(whole, rows=rows, microbatches=1, checkpointed=4),
    }


_SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Tuning(Training):
    """Trains with AdamW, whose steps do not grow from rounding where a gradient is zero."""

    def __init__(self, network: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__(network)
        self.make = make

    def configure_optimizers(self) -> Any:
        """Of what is trained."""
        return self.make([item for item in self.parameters() if item.requires_grad], lr=1e-2, eps=1e-3)


def transformer(name: str, **options: Any) -> nn.Module:
    """A small causal language model of transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**_SIZES | options)
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return made


def adapted(network: nn.Module, **options: Any) -> nn.Module:
    """Frozen, with adapters of peft."""
    import peft

    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    made: nn.Module = peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules=targets, **options))
    return made


@adapters("peft LoRA", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Tuning(adapted(transformer("Llama")).double()), loader(full()))


@adapters("peft DoRA", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Tuning(adapted(transformer("Llama"), use_dora=True).double()), loader(full()))


@adapters("bitsandbytes nf4, peft LoRA", tolerance=SINGLE)
def _(session: Session) -> None:
    import bitsandbytes

    network = transformer("Llama")
    for name, base in list(network.named_modules()):
        if isinstance(base, nn.Linear) and name != "lm_head":
            packed = bitsandbytes.nn.Linear4bit(
                base.in_features, base.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            packed.load_state_dict(base.state_dict())
            network.set_submodule(name, packed.to("cpu"))
    session.fit(Tuning(adapted(network)), loader(full()))


@optimizers("bitsandbytes AdamW8bit", tolerance=DOUBLE)
def _(session: Session) -> None:
    import bitsandbytes

    session.fit(Tuning(transformer("Llama").double(), bitsandbytes.optim.AdamW8bit), loader(full()))


@optimizers("bitsandbytes AdamW8bit, peft LoRA", tolerance=DOUBLE)
def _(session: Session) -> None:
    import bitsandbytes

    network = adapted(transformer("Llama")).double()
    session.fit(Tuning(network, bitsandbytes.optim.AdamW8bit), loader(full()))


def documents(count: int) -> list[Tensor]:
    """Words of documents of 3 to 12 words each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, WORDS, (length,), generator=generator) for length in lengths]


def places(lengths: Sequence[int]) -> Tensor:
    """Where each word is in its document."""
    return torch.cat([torch.arange(length) for length in lengths])


def unlabelled(words: Sequence[Tensor]) -> Tensor:
    """Labels: of a document's first word there is none, as no word before it foretells it."""
    return torch.cat([torch.cat([torch.tensor([IGNORED]), item[1:]]) for item in words])


def packed_rows() -> list[dict[str, Tensor]]:
    """Rows of one length, each of three documents."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROWS):
        cuts = sorted((torch.randperm(2 * LENGTH - 1, generator=generator)[:2] + 1).tolist())
        words = torch.randint(3, WORDS, (2 * LENGTH,), generator=generator)
        lengths = [end - start for start, end in itertools.pairwise([0, *cuts, 2 * LENGTH])]
        labels = unlabelled(words.split(lengths))
        made.append({"input_ids": words, "position_ids": places(lengths), "labels": labels})
    return made


@rows("packed, places told", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Tuning(transformer("Llama").double()), loader(packed_rows()))


@rows("packed, a mask for each", tolerance=DOUBLE)
def _(session: Session) -> None:
    every = packed_rows()
    for row in every:
        of = (row["position_ids"] == 0).cumsum(0)
        row["attention_mask"] = ((of[:, None] == of) & torch.ones(len(of), len(of), dtype=torch.bool).tril())[None]
    session.fit(Tuning(transformer("Llama").double()), loader(every))


@rows(FLAT, tolerance=DOUBLE)
def _(session: Session) -> None:
    import transformers

    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=False)
    every = [{"input_ids": words.tolist()} for words in documents(ROWS)]
    session.fit(Tuning(transformer("Llama").double()), DataLoader(every, batch_size=BATCH, collate_fn=collate))


class Attends(nn.Module):
    """A block over words of documents side by side, each of which sees its own document alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """Same shape."""
        found = []
        for part in self.qkv(self.norm(hidden)).split(lengths):
            query, key, value = part.view(len(part), 3, 4, WIDTH // 4).permute(1, 2, 0, 3)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            found.append(mixed.transpose(0, 1).flatten(1))
        hidden = hidden + self.out(torch.cat(found))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Documents(nn.Module):
    """A causal language model of documents side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Attends() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, places: Tensor, labels: Tensor, lengths: list[int]) -> Tensor:
        """The mean loss of a word."""
        hidden = self.embed(words) + self.place(places)
        for block in self.blocks:
            hidden = block(hidden, lengths)
        return F.cross_entropy(self.head(hidden)[:-1], labels[1:], ignore_index=IGNORED)


class Varied(Tuning):
    """Documents of a batch as a list, or side by side with where each begins."""

    def __init__(self) -> None:
        super().__init__(Documents().double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The network's loss."""
        if isinstance(batch, dict):
            words, bounds = batch["words"], batch["cu_seqlens"].tolist()
            parts = words.split([end - start for start, end in itertools.pairwise(bounds)])
        else:
            words, parts = torch.cat(batch), batch
        lengths = [len(part) for part in parts]
        loss: Tensor = self.network(words, places(lengths), unlabelled(parts), lengths)
        self.log("loss", loss, batch_size=len(parts))
        return loss


def side_by_side(parts: list[Tensor]) -> dict[str, Tensor]:
    """As kernels of attention want them."""
    bounds = torch.tensor([0, *itertools.accumulate(len(part) for part in parts)], dtype=torch.int32)
    return {"words": torch.cat(parts), "cu_seqlens": bounds}


@rows("lists of documents", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Varied(), DataLoader(documents(ROWS), batch_size=BATCH, collate_fn=list))  # type: ignore[arg-type]


@rows("cu_seqlens", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Varied(), DataLoader(documents(ROWS), batch_size=BATCH, collate_fn=side_by_side))  # type: ignore[arg-type]


_FEW = {"num_experts_per_tok": 2, "output_router_logits": True}
_DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
_DEEPSEEK |= {"moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_DEEPSEEK |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "n_shared_experts": 1}

EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, **_FEW},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, **_FEW},
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8, **_FEW},
    "DeepseekV3": _DEEPSEEK,
}


for _name in EXPERTS:

    @experts(f"{_name}, a loop", tolerance=DOUBLE)
    def _(session: Session, name: str = _name) -> None:
        session.fit(Tuning(transformer(name, **EXPERTS[name], experts_implementation="eager").double()), loader(full()))

    @experts(f"{_name}, one product", tolerance=SINGLE)
    def _(session: Session, name: str = _name) -> None:
        session.fit(Tuning(transformer(name, **EXPERTS[name], experts_implementation="grouped_mm")), loader(full()))


class InChunks(nn.Module):
    """A causal language model whose logits are never whole: each chunk's loss is computed, or recomputed, by itself."""

    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        self.network, self.is_recomputed = transformer("Llama"), is_recomputed

    def part(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sum of a chunk's losses."""
        return F.cross_entropy(self.network.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a word."""
        hidden = self.network.model(input_ids=input_ids).last_hidden_state[:, :-1]
        total = hidden.new_zeros(())
        for chunk, wanted in zip(hidden.split(4, 1), labels[:, 1:].split(4, 1), strict=True):
            if self.is_recomputed:
                total = total + checkpoint(self.part, chunk, wanted, use_reentrant=False)
            else:
                total = total + self.part(chunk, wanted)
        return total / labels[:, 1:].numel()


@losses("in chunks", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Tuning(InChunks(is_recomputed=False).double()), loader(full()))


@losses("in chunks, each recomputed", tolerance=DOUBLE)
def _(session: Session) -> None:
    session.fit(Tuning(InChunks(is_recomputed=True).double()), loader(full()))


EVERY = [use for theme in themes for use in theme.every]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="rows with this in their name")
    parser.add_argument("--plans", nargs="+", default=list(COLUMNS.values()), choices=list(COLUMNS.values()))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lightning-mist-fine-tuning")
    parser.add_argument("--again", action="store_true", help="do again what is in the folder")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a fit hangs")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    chosen = [use for use in EVERY if not options.only or any(text in use.key for text in options.only)]
    for name in LIBRARIES:
        import_module(name)  # before processes part
    found: dict[tuple[str, str], Cell] = {}
    for count in (BATCH, 1):
        folder, plans = options.work / f"{count}-rows", plans_of(count)
        work = Work(folder, again=options.again, patience_seconds=options.patience, plans=plans)
        found |= work.cells([use for use in chosen if (use.name == FLAT) == (count == 1)], options.plans)
    kinds = [cell.kind for cell in found.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys([*GOOD, *kinds])}
    summary = f"{len(chosen)} rows: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(summary)
    if not options.no_record:
        brought = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        table, reasons = rows_of(chosen, found, COLUMNS)
        write_record(make_record("fine-tuning", table, notes=f"{summary}. {reasons and f'{reasons} '}With {brought}."))
    return 0 if all(kind in GOOD for kind in kinds) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(2)
