"""Runs what a document shows, with what is around it there: a small module, its data, one CPU process.

``python -m tests.shown_python docs/fabric.md`` runs the blocks of one document, in order and in one namespace.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.planner.apart import spec_of
from lightning_mist import MistStrategy, plan_of
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.plan import codec

ROOT = Path(__file__).parent.parent


class Layer(nn.Module):
    """As much of a decoder's layer as documents name."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Twice as wide a sum as it gets."""
        hidden: Tensor = x + self.v_proj(torch.relu(self.q_proj(x)))
        return hidden


class LowRank(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.adapter = nn.Sequential(nn.Linear(8, rank, bias=False), nn.Linear(rank, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        both: Tensor = self.base(x) + self.adapter(x)
        return both


class MyModel(pl.LightningModule):
    """Any module: it brings its data, and is content with two batches."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Any:
        """Anything with a loss."""
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=x.square().mean())

    def training_step(self, batch: Tensor, index: int) -> Any:
        """Its loss."""
        return self(batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Two batches are enough."""
        self.trainer.should_stop = batch_idx == 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Those of what is trained."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Rows of numbers."""
        return DataLoader(torch.randn(16, 8), batch_size=4)  # type: ignore[arg-type]


class Returning(nn.Module):
    """What a loop of Fabric's calls by the names in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MyModel()

    def forward(self, x: Tensor) -> Any:
        """Anything with a loss."""
        return self.model(x)


def around(name: str) -> dict[str, Any]:
    """What the text of a document says is there."""
    found: dict[str, Any] = {"pl": pl, "MyModel": MyModel, "Fabric": Fabric, "LowRank": LowRank, "model": MyModel()}
    if name == "baselines.md":
        spec = spec_of(PRESETS["gpt3-1.3b"], "gpt3-1.3b", "1x2xL4", rows=256, sequence_length=1024)
        found |= {"spec": spec, "cluster": parse_cluster("1x2xL4")}
    elif name == "fabric.md":
        model = Returning()
        found |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        found |= {"loader": DataLoader([{"x": torch.randn(8)} for _ in range(8)], batch_size=4)}  # type: ignore[arg-type]
    elif name == "memory-estimates.md":
        found |= {"module": MyModel(layers=32), "batch": torch.randn(1, 8)}
    elif name in ("README.md", "options.md"):
        codec.save(plan_of(2, world_size=1, global_batch_size=4), "plan.json")
    return found


def try_what_it_defines(name: str, namespace: dict[str, Any]) -> None:
    """Use what a document only defines, or does not train with."""
    if name == "large-models.md":

        class Lazy(MyModel):
            configure_model = namespace["configure_model"]

            def __init__(self) -> None:
                super().__init__(layers=0)
                self.network: nn.Module | None = None

            def forward(self, x: Tensor) -> Any:
                assert self.network is not None
                return SimpleNamespace(loss=self.network(x).square().mean())

        namespace["pl"].Trainer(strategy="mist", **QUIET).fit(Lazy())
    elif name in ("fine-tuning.md", "many-machines.md"):
        namespace["trainer"].fit(namespace["model"])


QUIET: dict[str, Any] = {"devices": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def run(path: Path) -> None:
    """Run the blocks of a document."""
    text = path.read_text(encoding="utf-8")
    namespace = around(path.name)
    namespace["Network"] = Layer
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        # Of its devices there is one, of the machine that it is about.
        here = re.sub(r"(num_nodes=2, )?devices=8", "devices=1, accelerator='cpu'", block)
        exec(compile(here, path.name, "exec"), namespace)
    try_what_it_defines(path.name, namespace)
    for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if path.name == "checkpoints.md" else ():
        asked = yaml.safe_load(block)["trainer"]["strategy"]
        assert asked["class_path"] == "lightning_mist.MistStrategy"
        MistStrategy(**asked["init_args"])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(ROOT / name)
