"""Reports about layers that a wrapper did not expect: shared, called by another name, with state, routed, hooked."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.reports.cases import Reports, Wrapped, of
from benchmarks.uses.session import Session
from tests.traps.project import LAYERS, LENGTH, ROWS, VOCABULARY, WIDTH, Block, Project, loader

reports = Reports("networks")


@reports.project(
    "tatp22/linformer-pytorch#23", 'Error with DistributedDataParallel and parameter_sharing="layerwise"', layers=0
)
class Shared(Project):
    """All layers are one, recomputed each time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * LAYERS)

    def hidden(self, batch: Any) -> Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


class Featured(Block):
    """Has its computation under another name than ``forward``."""

    def features(self, hidden: Tensor) -> Tensor:
        return Block.forward(self, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.features(hidden).mean(1)


@reports.project("pytorch/pytorch#109385", "FSDP crashes when submodule calls method that isn't `forward()`", layers=0)
class ByMethod(Project):
    """Never calls its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Featured() for _ in range(LAYERS)))

    def hidden(self, batch: Any) -> Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block.features(hidden)
        return hidden


class Attends(nn.Module):
    """Attention with keys of another width: its weights are used by their module's parent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH // 2, vdim=WIDTH // 2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        keys = self.narrow(self.norm(hidden))
        return hidden + self.attention(self.norm(hidden), keys, keys, need_weights=False)[0]


@reports.project("pytorch/pytorch#26698", "MultiheadAttention and DDP incompatability")
class Attention(Project):
    """Layers of attention and of torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        own = (nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2))
        self.blocks = of(Attends(), Attends(), *own)


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        self.gru.flatten_parameters()
        return hidden + self.gru(self.norm(hidden))[0]


@reports.project("pytorch/pytorch#33238", "GRU model learns very slowly when using DataParallel with multiple GPUs")
class Recurrence(Project):
    """Recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Recurrent() for _ in range(LAYERS)))


class OldNorm(Block):
    """Weight normalisation by the hook that torch had first: the weight is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.utils.weight_norm(item) for item in (self.up, self.down))


@reports.project("pytorch/pytorch#28594", "[BUG] Can't Deepcopy module with weightnorm")
class WeightNorms(Project):
    """Layers under that normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(OldNorm() for _ in range(LAYERS)))


@reports.project("pytorch/pytorch#66363", "`torch.nn.utils.parametrizations.spectral_norm` cannot use twice")
class SpectralTwice(Project):
    """A layer under spectral normalisation that every step uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.hidden(batch)
        first, second = self.head(hidden), self.head(hidden.flip(1))
        loss = F.cross_entropy(first.flatten(0, 1), batch["y"].flatten()) + 0.1 * (first - second).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Routed(nn.Module):
    """Sends every token to one of several experts; those without tokens are left out."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(experts)])

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = self.norm(hidden).flatten(0, 1)
        weight, choice = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(choice == number)
            if len(at):
                out = out.index_add(0, at, expert(tokens[at]) * weight[at, None])
        return hidden + out.view_as(hidden)


@reports.project("hiyouga/LlamaFactory#2315", "Patch for full training Mixtral using DeepSpeed Zero3")
class Experts(Project):
    """Layers of experts, some of which have no tokens on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Routed() for _ in range(LAYERS)))


def _mixed(rows: Any) -> Any:
    """A batch, which has images or not: where one rank's has, the other's has none."""
    batch = torch.utils.data.default_collate(rows)
    first = int(batch["index"][0])
    if (first // (2 * ROWS) + first) % 2:
        return batch
    return batch | {"image": torch.stack([batch["z"].double() * number for number in range(WIDTH)], 1)}


@reports("deepspeedai/DeepSpeed#7170", "zero3 training hangs when with mixed multimodal dataset")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).double()

        def hidden(self, batch: Any) -> Tensor:
            hidden = self.embed(batch["x"])
            if "image" in batch:
                hidden = torch.cat([self.vision(batch["image"])[:, None], hidden[:, 1:]], 1)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    session.fit(Net(), loader(collate_fn=_mixed), loader(16, seed=1, collate_fn=_mixed))


@reports.project("Lightning-AI/pytorch-lightning#13764", "Handle LazyModuleMixin Properly")
class Lazy(Project):
    """Layers whose widths a first batch tells."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.pair = nn.LazyLinear(VOCABULARY, dtype=torch.float64), nn.Linear(3, 3).double()

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            self.loss(next(iter(loader(8))))


class Spectrum(nn.Module):
    """Multiplies the lowest frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(2, WIDTH, WIDTH, dtype=torch.complex128))
        self.skip = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        low = torch.fft.rfft(hidden, dim=1)[:, :2]
        low = torch.einsum("bmi,mio->bmo", low, self.weight)
        return hidden + F.gelu(torch.fft.irfft(low, n=hidden.shape[1], dim=1) + self.skip(hidden))


@reports.project("lucidrains/audiolm-pytorch#193", "Improve ComplexConv2d FSDP compatibility")
class Fourier(Project):
    """Layers with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Spectrum() for _ in range(LAYERS)])


class Scaled(Project):
    """A learned scale without dimensions, kept in bounds between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def logits(self, batch: Any) -> Tensor:
        return self.scale.exp() * super().logits(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.scale.clamp_(0.0, 0.52)


@reports(
    "pytorch/pytorch#130810",
    "RuntimeError in _multi_tensor_adamw: Output Shape Mismatch During torch.foreach_lerp Operation",
)
def _(session: Session) -> None:
    keep = ModelCheckpoint(session.folder / "checkpoints", save_last=True)
    session.fit(Scaled(), callbacks=[keep], enable_checkpointing=True)
    session.fit(Scaled(), ckpt_path=session.folder / "checkpoints" / "last.ckpt", max_epochs=3)


class Rotated(Block):
    """Turns features by position with a table that it makes when it needs one."""

    table: Any = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.table is None or (self.training and self.table.is_inference()):
            angles = torch.arange(hidden.shape[1], dtype=hidden.dtype)[:, None] / (1 + torch.arange(WIDTH // 2))
            self.table = torch.stack([angles.cos(), angles.sin()])
        (cos, sin), (even, odd) = self.table, hidden.chunk(2, -1)
        return super().forward(torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1))


@reports.project("Dao-AILab/flash-attention#299", "rotary: update cos/sin cache when switching from inference mode")
class Rotary(Project):
    """Layers with tables that validation makes first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Rotated() for _ in range(LAYERS)))


class Reversal(torch.autograd.Function):
    """Passes values on and turns gradients around."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, share: float) -> Tensor:
        ctx.share = share
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.share * gradient, None


@reports.project("pytorch/pytorch#1110", "Gradient reversal layer")
class Adversarial(Project):
    """Learns features that do not tell a row's domain, more so with every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = self.global_step / float(self.trainer.estimated_stepping_batches)
        hidden = self.hidden(batch)
        domain = self.pair(Reversal.apply(hidden.mean(1), share))
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        apart = F.cross_entropy(domain, batch["z"])
        self.log_dict({"labels": loss, "domains": apart, "share": share})
        return loss + apart


class Kept(nn.Module):
    """A layer that is trained as a copy, beside the original."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original, self.trained = layer, copy.deepcopy(layer)

    def forward(self, value: Tensor) -> Tensor:
        return self.trained(value)


class Adapted(Block):
    """A frozen block with a low-rank path, for the tokens from an offset on that a hook hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down_rank, self.up_rank = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: Tensor, offsets: Tensor | None = None) -> Tensor:
        out = super().forward(hidden)
        if offsets is None:
            return out
        behind = torch.arange(hidden.shape[1]) >= offsets[:, None]
        return out + self.up_rank(self.down_rank(hidden)) * behind[..., None]


@reports.project("huggingface/peft#899", "Modules_to_save can't be used with DDP and gradient checkpointing")
class Saved(Project):
    """Adapters in recomputed layers, and a head of which there are two, both asking for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = of(*(Adapted() for _ in range(LAYERS))), Kept(self.head)
        self.embed.requires_grad_(False)

    def hidden(self, batch: Any) -> Tensor:
        hidden, start = self.embed(batch["x"]), torch.zeros(len(batch["x"]), dtype=torch.long)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, start, use_reentrant=False)
        return hidden


@reports.project("huggingface/peft#2826", "Gradient checkpointing and Activated LoRA models")
class Activated(Project):
    """Hands offsets to its layers by hooks that are gone when a recomputation would need them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Adapted() for _ in range(LAYERS)))

    def hidden(self, batch: Any) -> Tensor:
        offsets = torch.arange(len(batch["x"])) % LENGTH

        def hand(block: Any, values: Any, named: Any) -> Any:
            return values, named | {"offsets": offsets}

        handles = [block.register_forward_pre_hook(hand, with_kwargs=True) for block in self.blocks]
        hidden = super().hidden(batch)
        for handle in handles:
            handle.remove()
        return hidden


@reports.project("huggingface/trl#1652", "DPOTrainer deepspeed.initialize cause ref_model not fixed", layers=0)
class Preferred(Wrapped):
    """Prefers some continuations to others, beside a copy that stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.net).eval().requires_grad_(False)

    def chance(self, network: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return network(tokens).log_softmax(-1).gather(-1, labels[..., None]).sum((1, 2))

    def loss(self, batch: Any) -> Tensor:
        tokens, better, worse = batch["x"], batch["y"], batch["y"].flip(1)
        with torch.no_grad():
            before = self.chance(self.reference, tokens, better) - self.chance(self.reference, tokens, worse)
        now = self.chance(self.net, tokens, better) - self.chance(self.net, tokens, worse)
        return -F.logsigmoid(0.1 * (now - before)).mean()


@reports.project(
    "Lightning-AI/pytorch-lightning#17653", "Gradients in valid/test step not allowed", inference_mode=False
)
class Forces(Project):
    """An energy and its gradient by the input, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(VOCABULARY, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    @torch.enable_grad()
    def loss(self, batch: Any) -> Tensor:
        place = F.one_hot(batch["x"], VOCABULARY).double().requires_grad_()
        hidden = self.embed(place)
        for block in self.blocks:
            hidden = block(hidden)
        energy = self.head(hidden).sum((1, 2))
        (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
        return (energy - batch["z"]).square().mean() + force.square().mean()
