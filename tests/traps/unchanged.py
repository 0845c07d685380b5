"""Projects that every plan trains as DDP does: what honesty must not cost."""

from tests.traps.project import PLANS, Trap, loader

PLANS_WITH_LAYERS = tuple(name for name in PLANS if not name.endswith("w"))
"""Those of context parallelism are refused: the layers sum over tokens."""

TRAPS = {
    "ordinary": Trap(
        plans=PLANS_WITH_LAYERS,
        equal=tuple(name for name in PLANS_WITH_LAYERS if not name.startswith("cp")),
        val=lambda: loader(16, seed=1),
        reason="meet in cumsum",
    ),
}
