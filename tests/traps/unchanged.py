"""Projects that every plan trains as DDP does: what honesty must not cost."""

from tests.traps.project import PLANS, Trap, loader

TRAPS = {
    "ordinary": Trap(plans=tuple(PLANS), equal=tuple(PLANS), val=lambda: loader(16, seed=1)),
}
