"""Plans beside the chosen one, whose predictions are made when somebody looks at them.

To choose a plan the seconds of all that compete with it are needed. What their stages hold by term, and where their
seconds go, takes several times as long to work out, and whoever only runs the plan never asks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from lightning_mist.cost import CostModel, predictions
from lightning_mist.plan import Plan, Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan of another kind than the chosen one.

    Attributes:
        name: What distinguishes it, for example ``"2 stages"``.
        plan: The plan, with its prediction.
    """

    name: str
    plan: Plan

    @property
    def predicted(self) -> Predicted:
        """Its predicted seconds and bytes."""
        assert self.plan.predicted is not None
        return self.plan.predicted


class Alternatives(Sequence[Alternative]):
    """Alternatives in their order, equal to a tuple of the same; all are predicted together when one is looked at.

    Until then they keep the cost model. Pickled they are a tuple.

    Args:
        model: The cost model.
        named: What distinguishes each, and the plan.
    """

    def __init__(self, model: CostModel, named: Sequence[tuple[str, Plan]]) -> None:
        self._count = len(named)
        self._find: Callable[[], tuple[Alternative, ...]] | None = lambda: _predicted(model, named)
        self._found: tuple[Alternative, ...] = ()

    @property
    def _all(self) -> tuple[Alternative, ...]:
        if self._find is not None:
            self._found, self._find = self._find(), None
        return self._found

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Alternative: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Alternative, ...]: ...

    def __getitem__(self, index: int | slice) -> Alternative | tuple[Alternative, ...]:
        return self._all[index]

    def __iter__(self) -> Iterator[Alternative]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return self._all == (other._all if isinstance(other, Alternatives) else other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._all,)


def _predicted(model: CostModel, named: Sequence[tuple[str, Plan]]) -> tuple[Alternative, ...]:
    found = predictions(model, [plan for _, plan in named])
    return tuple(
        Alternative(name=name, plan=replace(plan, predicted=item))
        for (name, plan), item in zip(named, found, strict=True)
    )
