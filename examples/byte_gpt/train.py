"""Train a GPT on the bytes of the Python standard library.

An ordinary Lightning project. Every strategy that Lightning knows will do:

    python examples/byte_gpt/train.py --strategy ddp --accelerator cpu --devices 2
    python examples/byte_gpt/train.py --strategy mist --accelerator cpu --devices 2
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
from data import StandardLibrary
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from model import ByteGPT


class PrintLoss(Callback):
    """One line every few steps: shorter than a progress bar, and readable in a log file."""

    def __init__(self, every: int) -> None:
        self.every = every

    @rank_zero_only
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Print the step's training loss."""
        if trainer.global_step == 1 or trainer.global_step % self.every == 0:
            loss = float(trainer.callback_metrics["train_loss"])
            print(f"step {trainer.global_step:5d} of {trainer.max_steps}   train loss {loss:.3f}", flush=True)

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Print the validation loss, except of the sanity check."""
        if not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["val_loss"])
            print(f"step {trainer.global_step:5d} of {trainer.max_steps}   val loss   {loss:.3f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="any strategy that Lightning knows")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per batch and process")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="bytes per window")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/byte_gpt"), help="where logs and checkpoints go")
    parser.add_argument("--ckpt-path", help="checkpoint to continue from")
    return parser.parse_args()


def main() -> None:
    """Train, then say where everything is."""
    arguments = parse_arguments()
    pl.seed_everything(arguments.seed)
    model = ByteGPT(layers=arguments.layers, width=arguments.width, length=arguments.length, dropout=arguments.dropout)
    data = StandardLibrary(length=arguments.length, batch_size=arguments.batch_size)
    checkpoint = ModelCheckpoint(
        dirpath=arguments.out / "checkpoints",
        filename="byte_gpt-{step}-{val_loss:.3f}",
        monitor="val_loss",
        save_top_k=1,
    )
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        precision=arguments.precision,
        max_steps=arguments.max_steps,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        val_check_interval=max(1, arguments.max_steps // 2) * arguments.accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=10,
        callbacks=[checkpoint, LearningRateMonitor(), PrintLoss(every=10)],
        logger=CSVLogger(arguments.out, name="logs"),
        default_root_dir=arguments.out,
        enable_progress_bar=False,
    )
    trainer.fit(model, data, ckpt_path=arguments.ckpt_path)
    trainer.print(f"final val loss {float(trainer.callback_metrics['val_loss']):.3f} nats per byte")
    trainer.print(f"checkpoint     {checkpoint.best_model_path}")
    trainer.print(f"metrics        {Path(trainer.logger.log_dir) / 'metrics.csv'}")


if __name__ == "__main__":
    main()
