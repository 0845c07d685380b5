"""Experts: layers whose insides hang on values, in the forms in which people write them."""

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.project import LAYERS, WIDTH, Project, Trap

EXPERTS, CHOSEN = 4, 2


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def places(self, mask: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        top, chosen = self.router(hidden).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            row, slot = self.places(chosen == number)
            out = out.index_add(0, row, expert(hidden[row]) * top[row, slot, None])
        return x + out.view_as(x)


class AsTuple(_Experts):
    def places(self, mask: torch.Tensor) -> Any:
        return mask.nonzero(as_tuple=True)


class OfTorch(_Experts):
    def places(self, mask: torch.Tensor) -> Any:
        return torch.nonzero(mask, as_tuple=True)


class AsPairs(_Experts):
    def places(self, mask: torch.Tensor) -> Any:
        return mask.nonzero().unbind(1)


class ByWhere(_Experts):
    def places(self, mask: torch.Tensor) -> Any:
        return torch.where(condition=mask)


class ByArgwhere(_Experts):
    def places(self, mask: torch.Tensor) -> Any:
        return torch.argwhere(mask).T


class ByMask(_Experts):
    """Indexes by masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        top, chosen = self.router(hidden).softmax(-1).max(-1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            out[mask] = expert(hidden[mask]) * top[mask][:, None]
        return x + out.view_as(x)


class Skipping(_Experts):
    """Leaves out experts that nobody has chosen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        top, chosen = self.router(hidden).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if row.numel() == 0:
                continue
            out = out.index_add(0, row, expert(hidden[row]) * top[row, slot, None])
        return x + out.view_as(x)


class Grouped(_Experts):
    """One product of all experts, and a penalty by how many tokens each has got."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        top, chosen = self.router(hidden).softmax(-1).topk(CHOSEN, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        made = torch._grouped_mm(hidden[order // CHOSEN], self.weight, offs=counts.cumsum(0).int())
        scaled = made * top.flatten()[order, None]
        return x + torch.zeros_like(hidden).index_add(0, order // CHOSEN, scaled).view_as(x)


class Cropping(_Experts):
    """What it returns has a row for each token that was chosen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.router(x).amax(-1) > self.router(x).amax(-1).mean()
        rows = kept.any(1).nonzero().flatten()
        return x.index_select(0, rows) if len(rows) else x


class Told(_Experts):
    """Tells how many tokens it has taken, by which the step goes on."""

    def forward(self, x: torch.Tensor) -> Any:
        chosen = self.router(x).argmax(-1) == 0
        return self.experts[0](x), int(chosen.sum())


def _of(layer: type[nn.Module], *, single: bool = False, **options: Any) -> Trap:
    class Uses(Project):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([layer() for _ in range(LAYERS)])
            if single:
                self.float()
            else:
                self.double()

    return Trap(module=Uses, **({"plans": PLANS, "equal": PLANS, "tolerance": 1e-5 if single else 1e-9} | options))


class Telling(Project):
    """Goes on otherwise by what a layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Told() for _ in range(LAYERS)]).double()

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden, taken = block(hidden)
            hidden = hidden * (2.0 if taken > 12 else 1.0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


TOLD: ContextVar[list[torch.Tensor]] = ContextVar("told")


class Routed(ByWhere):
    """Tells what the router says, by a hook, to whoever listens: it is made before tokens are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router.register_forward_hook(lambda module, args, output: TOLD.get([]).append(output))


class Loaded(Routed):
    """Tells it by the last expert's work too, which follows what is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[-1].register_forward_hook(lambda module, args, output: TOLD.get([]).append(output))


class Balanced(Project):
    """Adds to its loss what layers tell."""

    layer: type[nn.Module] = Routed

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.layer() for _ in range(LAYERS)]).double()

    def loss(self, batch: Any) -> torch.Tensor:
        told: list[torch.Tensor] = []
        token = TOLD.set(told)
        loss = super().loss(batch)
        TOLD.reset(token)
        return loss + 0.1 * sum(item.softmax(-1).mean(0).square().sum() for item in told)


class BalancedByLoad(Balanced):
    layer = Loaded


PLANS = ("zero1", "zero3", "pp2")

TRAPS = {
    "as tuple": _of(AsTuple),
    "of torch": _of(OfTorch),
    "as pairs": _of(AsPairs),
    "by where": _of(ByWhere),
    "by argwhere": _of(ByArgwhere),
    "by mask": _of(ByMask),
    "skipping": _of(Skipping),
    "grouped": _of(Grouped, single=True),
    "cropping": _of(Cropping, equal=()),
    "balanced": Trap(module=Balanced, plans=(*PLANS, "checkpointed"), equal=PLANS),
    "balanced by load": Trap(module=BalancedByLoad, plans=PLANS, equal=("zero1", "zero3"), reason="inside layer"),
    "telling": Trap(module=Telling, plans=PLANS, equal=("zero1", "zero3"), reason="depends on parameters"),
}
