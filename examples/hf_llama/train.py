"""Train a Hugging Face Llama, built from its configuration, with LightningCLI.

An ordinary Lightning project. Nothing is downloaded: the model starts from random weights and the corpus is the Python
standard library's own sources, as bytes.

    python examples/hf_llama/train.py fit --config examples/hf_llama/config.yaml
    python examples/hf_llama/train.py fit --config examples/hf_llama/config.yaml --trainer.strategy=mist
"""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
"""Every byte is a token."""


class Llama(pl.LightningModule):
    """A small Llama with grouped-query attention.

    Args:
        layers: Number of decoder layers.
        width: Size of the residual stream.
        heads: Query heads; must divide ``width``.
        key_value_heads: Key and value heads; must divide ``heads``.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 128,
        heads: int = 4,
        key_value_heads: int = 2,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=8 * width // 3,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=key_value_heads,
                max_position_embeddings=1024,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean loss of a batch of token windows, in nats per byte."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean loss of a batch."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on everything."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Sources(pl.LightningDataModule):
    """Windows of the standard library's top-level modules; every tenth window is for validation.

    Args:
        length: Bytes per window.
        batch_size: Windows per batch and process.
    """

    def __init__(self, length: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the files."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        if not files:
            raise FileNotFoundError("this Python was installed without its library's sources")
        text = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        windows = text[: len(text) // self.length * self.length].view(-1, self.length).long()
        held_out = torch.arange(len(windows)) % 10 == 0
        self.train, self.val = windows[~held_out], windows[held_out]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The held-out windows, in order."""
        return DataLoader(self.val, batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(Llama, Sources)
