"""What steps do beside their layers: networks in metrics, counts for layers, growing sequences, own evaluation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

from tests.traps.project import LAYERS, LENGTH, VOCABULARY, WIDTH, Block, Project, Trap

EVERY = ("auto", "zero1", "zero3", "zero3whole", "pp2", "tp2", "moved0", "moved3")


class Judged(Metric):
    """Compares with what a frozen network says."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double().requires_grad_(False)
        self.add_state("total", default=torch.zeros(()).double(), dist_reduce_fx="sum")

    def update(self, hidden: torch.Tensor) -> None:
        self.total += self.judge(hidden).mean()

    def compute(self) -> torch.Tensor:
        return self.total


class Judging(Project):
    """Logs what a frozen network within a metric says."""

    def __init__(self) -> None:
        super().__init__()
        self.judged = Judged()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        self.judged.update(hidden.detach())
        self.log("judged", self.judged, on_step=False, on_epoch=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


class Teacher(Metric):
    """Holds a frozen copy of a layer and reads its weight itself."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2).double().requires_grad_(False)
        self.add_state("total", default=torch.zeros(()).double(), dist_reduce_fx="sum")

    def update(self, hidden: torch.Tensor) -> None:
        self.total += (hidden @ self.layer.weight.T).mean()

    def compute(self) -> torch.Tensor:
        return self.total


class OfTeacher(Judging):
    def __init__(self) -> None:
        super().__init__()
        self.judged = Teacher()


class JudgedInForward(Judging):
    """The metric is called, and its value for the batch is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        self.log("judged", self.judged(hidden.detach()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


class Counted(Block):
    """Is handed what it does not look at, as layers of transformers are."""

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().forward(hidden)


class Counting(Project):
    """Divides a sum by how many labels there are, which all layers are handed too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted() for _ in range(LAYERS)]).double()

    def loss(self, batch: Any) -> torch.Tensor:
        count = (batch["y"] != 3).sum()
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden, num_items_in_batch=count)
        logits = self.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, batch["y"].flatten(), ignore_index=3, reduction="sum") / count


class Handed(Counting):
    """Layers look at what they are handed."""

    def __init__(self) -> None:
        super().__init__()

        class Looks(Counted):
            def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
                return super().forward(hidden) * (1 + options["num_items_in_batch"] / 100)

        self.blocks = nn.ModuleList([Looks() for _ in range(LAYERS)]).double()


class Curriculum(Project):
    """Sequences grow by the step's own doing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        length = min(2 + self.global_step, LENGTH)
        loss = self.loss({"x": batch["x"][:, :length], "y": batch["y"][:, :length]})
        self.log("train_loss", loss)
        return loss


class Shrinking(Curriculum):
    """Rows become fewer by the step's own doing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = 4 - min(self.global_step // 2, 2)
        return self.loss({"x": batch["x"][:rows], "y": batch["y"][:rows]})


class Evaluating(Project):
    """Evaluates itself now and then."""

    context = torch.inference_mode

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step % 3 == 2:
            self.eval()
            with self.context():
                value = self.loss(batch)
            self.train()
            self.log("own_loss", value)
        return super().training_step(batch, batch_idx)


class EvaluatingOften(Evaluating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            self.log("own_loss", self.loss(batch))
        return Project.training_step(self, batch, batch_idx)


class EvaluatingWithout(Evaluating):
    context = torch.no_grad


assert VOCABULARY > 3

TRAPS = {
    "judged": Trap(module=Judging, plans=EVERY, equal=("auto", "zero1", "moved0"), reason="has parameters"),
    "teacher": Trap(module=OfTeacher, plans=EVERY, equal=("auto", "zero1", "moved0")),
    "judged in forward": Trap(module=JudgedInForward, plans=EVERY, equal=("auto", "zero1", "moved0")),
    "counting": Trap(module=Counting, plans=("halves", "pp2cut", *EVERY), equal=("halves", "pp2cut", *EVERY)),
    "handed": Trap(module=Handed, plans=("halves", "pp2cut", "pp2", "zero3"), equal=("pp2", "zero3"), reason="rows"),
    "curriculum": Trap(module=Curriculum, plans=EVERY, equal=("auto", "zero1", "zero3", "tp2")),
    "shrinking": Trap(module=Shrinking, plans=EVERY, equal=("auto", "zero1", "zero3", "tp2")),
    "evaluating": Trap(module=Evaluating, plans=EVERY, equal=("auto", "zero1")),
    "evaluating often": Trap(module=EvaluatingOften, plans=EVERY, equal=("auto",)),
    "evaluating without": Trap(module=EvaluatingWithout, plans=EVERY, equal=("auto", "zero1")),
}
