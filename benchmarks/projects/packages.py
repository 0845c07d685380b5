"""Models of published packages, trained as their own tutorials do: the Trainer is theirs or made beside them."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

COMMON = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "enable_progress_bar": False}
SHORT = {**COMMON, "limit_train_batches": 12, "limit_val_batches": 4}


def bert(strategy: str) -> Any:
    """A BERT classifier after Lightning's tutorial: warm-up from the number of steps, groups of decay, kept outputs."""
    from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
            )
            self.model = BertForSequenceClassification(config)
            self.accuracy, self.f1, self.outputs = BinaryAccuracy(), BinaryF1Score(), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            found = self.model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])
            self.outputs.append((found.loss, found.logits.argmax(-1), batch[2]))

        def on_validation_epoch_end(self) -> None:
            losses, guesses, labels = (list(items) for items in zip(*self.outputs, strict=True))
            self.outputs.clear()
            self.log("val_loss", torch.stack(losses).mean(), prog_bar=True, sync_dist=True)
            guessed, true = torch.cat(guesses), torch.cat(labels)
            self.log_dict({"accuracy": self.accuracy(guessed, true), "f1": self.f1(guessed, true)}, sync_dist=True)

        def configure_optimizers(self) -> Any:
            spared = ("bias", "LayerNorm.weight")
            groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
            for name, parameter in self.model.named_parameters():
                groups[any(word in name for word in spared)]["params"].append(parameter)
            optimizer = torch.optim.AdamW(groups, lr=2e-4, eps=1e-8)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]

    pl.seed_everything(1)
    tokens, lengths = torch.randint(1, 500, (256, 24)), torch.randint(6, 25, (256, 1))
    mask = (torch.arange(24) < lengths).long()
    rows = TensorDataset(tokens * mask, mask, torch.randint(0, 2, (256,)))
    saved = pl.callbacks.ModelCheckpoint(dirpath="kept", monitor="val_loss", save_last=True)
    trainer = pl.Trainer(strategy=strategy, callbacks=[saved, pl.callbacks.LearningRateMonitor()], **SHORT)
    trainer.fit(Classifier(), DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, batch_size=16))
    return saved.best_model_score


def forecasting(strategy: str) -> None:
    """pytorch-forecasting's temporal fusion transformer on its own generated series: its metrics, early stopping."""
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.data.examples import generate_ar_data
    from pytorch_forecasting.metrics import QuantileLoss

    pl.seed_everything(1)
    table = generate_ar_data(seasonality=10.0, timesteps=100, n_series=20, seed=1)
    table["static"] = "2"
    training = TimeSeriesDataSet(
        table[lambda rows: rows.time_idx < 90],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        static_categoricals=["static"],
        time_varying_unknown_reals=["value"],
        max_encoder_length=30,
        max_prediction_length=10,
    )
    validation = TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=90)
    model = TemporalFusionTransformer.from_dataset(
        training, learning_rate=0.03, hidden_size=16, attention_head_size=2, dropout=0.1, loss=QuantileLoss()
    )
    callbacks = [pl.callbacks.EarlyStopping(monitor="val_loss", patience=5), pl.callbacks.LearningRateMonitor()]
    # Its attention over covariates that are not there has no gradients: DDP has to be told.
    name = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    trainer = pl.Trainer(strategy=name, gradient_clip_val=0.1, callbacks=callbacks, **SHORT)
    trainer.fit(
        model,
        train_dataloaders=training.to_dataloader(train=True, batch_size=16, num_workers=0),
        val_dataloaders=validation.to_dataloader(train=False, batch_size=16, num_workers=0),
    )


def gluonts(strategy: str) -> Any:
    """gluonts' PatchTST: a loader of a stream, the Trainer is made by the package; its forecasts."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import PatchTSTEstimator

    pl.seed_everything(1)
    generator = np.random.default_rng(0)
    series = [{"start": "2024-01-01", "target": generator.normal(size=200).cumsum()} for _ in range(16)]
    data = ListDataset(series, freq="D")
    estimator = PatchTSTEstimator(
        prediction_length=12,
        context_length=48,
        patch_len=8,
        batch_size=16,
        num_batches_per_epoch=8,
        trainer_kwargs={"strategy": strategy, **COMMON},
    )
    predictor = estimator.train(data)
    torch.manual_seed(0)
    return [float(forecast.mean.sum()) for forecast in predictor.predict(data)]


def neuralforecast(strategy: str) -> None:
    """neuralforecast's PatchTST (pytorch_lightning): batch normalisation in attention, steps in place of epochs."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import PatchTST

    generator = np.random.default_rng(0)
    days = pd.date_range("2024-01-01", periods=150, freq="D")
    table = pd.concat(
        pd.DataFrame({"unique_id": f"s{n}", "ds": days, "y": generator.normal(size=150).cumsum()}) for n in range(8)
    )
    options = {**COMMON, "max_steps": 12}
    del options["max_epochs"]
    model = PatchTST(
        h=12,
        input_size=48,
        hidden_size=32,
        n_heads=4,
        encoder_layers=2,
        batch_size=4,
        windows_batch_size=32,
        val_check_steps=6,
        random_seed=1,
        strategy=strategy,
        **options,
    )
    NeuralForecast(models=[model], freq="D").fit(table, val_size=24)


def chemprop(strategy: str) -> None:
    """chemprop's message passing over molecules: graphs in a dataclass batch, a schedule by steps."""
    from chemprop import data, featurizers, models, nn

    pl.seed_everything(1)
    smiles = ["C" * n + tail for n in range(1, 17) for tail in ("O", "N", "Cl", "C(=O)O", "c1ccccc1", "C#N")]
    generator = np.random.default_rng(0)
    points = [data.MoleculeDatapoint.from_smi(text, generator.normal(size=1)) for text in smiles]
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    rows = data.MoleculeDataset(points, featurizer)
    rows.normalize_targets()
    model = models.MPNN(
        nn.BondMessagePassing(d_h=64), nn.MeanAggregation(), nn.RegressionFFN(input_dim=64), batch_norm=True
    )
    trainer = pl.Trainer(strategy=strategy, **SHORT)
    trainer.fit(
        model,
        data.build_dataloader(rows, batch_size=8, num_workers=0),
        data.build_dataloader(rows, batch_size=8, num_workers=0, shuffle=False),
    )


def darts(strategy: str) -> None:
    """darts' N-BEATS (pytorch_lightning): blocks in stacks, double precision, the Trainer is made by the package."""
    from darts import TimeSeries
    from darts.models import NBEATSModel

    generator = np.random.default_rng(0)
    series = [TimeSeries.from_values(generator.normal(size=120).cumsum()) for _ in range(4)]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=6,
        num_stacks=4,
        num_blocks=1,
        layer_widths=32,
        batch_size=16,
        n_epochs=2,
        random_state=1,
        pl_trainer_kwargs={"strategy": strategy, "accelerator": "cpu", "devices": 2, "limit_train_batches": 12},
    )
    model.fit(series, verbose=False)


def simclr(strategy: str) -> None:
    """lightly's SimCLR: batch normalisation and a loss over the batches of all processes."""
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            resnet = torchvision.models.resnet18()
            self.backbone = torch.nn.Sequential(*list(resnet.children())[:-1])
            self.projection_head = SimCLRProjectionHead(512, 128, 32)
            self.criterion = NTXentLoss(gather_distributed=True)
            # It has no bank; where one would begin is memory that nobody wrote.
            self.criterion.memory_bank.bank_ptr.zero_()

        def forward(self, x: Any) -> Any:
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_index: int) -> Any:
            loss = self.criterion(self.forward(batch[0]), self.forward(batch[1]))
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    pl.seed_everything(1)
    rows = TensorDataset(torch.randn(96, 3, 32, 32), torch.randn(96, 3, 32, 32))
    loader = DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)
    pl.Trainer(strategy=strategy, **{**SHORT, "limit_train_batches": 6}).fit(SimCLR(), loader)


def segmentation(strategy: str) -> None:
    """segmentation_models_pytorch's U-Net after its tutorial: outputs kept over an epoch, metrics at its end."""
    import segmentation_models_pytorch as smp

    class Segments(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.kept: dict[str, list[Any]] = {"train": [], "valid": []}

        def shared_step(self, batch: Any, stage: str) -> Any:
            logits = self.model(batch[0])
            loss = self.loss_fn(logits, batch[1])
            guessed = (logits.sigmoid() > 0.5).float()
            tp, fp, fn, tn = smp.metrics.get_stats(guessed.long(), batch[1].long(), mode="binary")
            self.kept[stage].append({"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn})
            return self.kept[stage][-1]

        def shared_epoch_end(self, stage: str) -> None:
            counts = [torch.cat([item[name] for item in self.kept[stage]]) for name in ("tp", "fp", "fn", "tn")]
            self.kept[stage].clear()
            metrics = {
                f"{stage}_{reduction}_iou": smp.metrics.iou_score(*counts, reduction=reduction)
                for reduction in ("micro", "micro-imagewise")
            }
            self.log_dict(metrics, prog_bar=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.shared_step(batch, "train")

        def on_train_epoch_end(self) -> None:
            self.shared_epoch_end("train")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.shared_step(batch, "valid")

        def on_validation_epoch_end(self) -> None:
            self.shared_epoch_end("valid")

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=2e-4)

    pl.seed_everything(1)
    rows = TensorDataset(torch.randn(48, 3, 32, 32), (torch.randn(48, 1, 32, 32) > 0).float())
    options = {**SHORT, "limit_train_batches": 6, "limit_val_batches": 2}
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(Segments(), DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=4))


def scvi(strategy: str) -> None:
    """scvi-tools' scVI: a Trainer and a training plan of its own, batch normalisation, annealing by epochs."""
    import anndata
    import scvi as package

    package.settings.seed = 1
    counts = np.random.default_rng(0).poisson(1.0, (400, 60)).astype(np.float32)
    table = anndata.AnnData(counts)
    package.model.SCVI.setup_anndata(table)
    model = package.model.SCVI(table, n_hidden=32, n_latent=5)
    # It shares out data where the name of the strategy contains "ddp".
    name = {"ddp": "ddp_find_unused_parameters_true", "mist": "ddp_mist"}[strategy]
    model.train(max_epochs=2, batch_size=32, strategy=name, accelerator="cpu", devices=2, train_size=0.8)
