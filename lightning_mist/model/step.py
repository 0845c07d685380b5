"""One counted run of a user's step, forward and backward, part by part."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.batches import copy_containers
from lightning_mist.model.operators import storage_key
from lightning_mist.model.saved import Ledger, PhaseCount
from lightning_mist.model.split_step import RankView
from lightning_mist.model.walk import InputSignature, Walk, loss_of
from lightning_mist.model.weights import LinearCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is run: a module in which stand-ins fill the parameter slots, and how.

    Attributes:
        module: The module.
        blocks: The repeated blocks in execution order.
        parameters: The stand-ins.
        mode: The mode that the stand-ins are fakes of; ``None`` if they are real.
        call: Runs the user's step on a batch.
        context: Makes the context that the step's forward runs in (autocast).
        view: How one of several tensor-parallel ranks sees the step, if it is about one.
    """

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    mode: FakeTensorMode | None
    call: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    view: RankView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """What one step did.

    Indices: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. Without blocks the head is the whole step.

    Attributes:
        forward, backward: Operators and timelines; bytes alive in absolute numbers.
        saved: Bytes that each part's forward made and that were alive when the step's forward had ended.
        shared: Those of the head that the batch alone determines.
        made: Bytes of parameter gradients that each part's backward made and left.
        inputs: Signature of every block's inputs.
        entering: Shapes of the tensors that enter every block.
        guesses: How many values that only real numbers have were read into Python.
        describable: Whether each block's output can be imitated.
    """

    forward: tuple[PhaseCount, ...]
    backward: tuple[PhaseCount, ...]
    saved: tuple[int, ...]
    shared: int
    made: tuple[int, ...]
    inputs: tuple[InputSignature, ...]
    entering: tuple[tuple[tuple[int, ...], ...], ...]
    guesses: int
    describable: tuple[bool, ...]

    def forward_peaks(self, part: int) -> list[int]:
        """Timeline of the part's forward beyond the saved bytes of all parts before it."""
        base = sum(self.saved[:part])
        return [alive - base for alive in self.forward[part].timeline]

    def backward_peaks(self, part: int) -> list[int]:
        """Timeline of the part's backward beyond saved bytes up to its own and gradients that later parts made."""
        base = sum(self.saved[: part + 1]) + sum(self.made[part + 1 :])
        return [alive - base for alive in self.backward[part].timeline]


def _check_all_ran(ran: int, blocks: int) -> None:
    if ran != blocks:
        raise TraceError(
            f"the step called blocks {ran} times, but has {blocks} of them: each must run exactly once in every step; "
            "blocks that are dropped at random have no fixed cost"
        )


def count_step(
    subject: Subject, batch: Any, *, twins: Sequence[int | None], recompute: bool, gradients_exist: bool
) -> StepCount:
    """Run a step once and count.

    Args:
        subject: What to run.
        batch: On what.
        twins: For every block ``None`` to run it or the position of an earlier block that runs and is imitated.
        recompute: Whether the blocks that run are checkpointed.
        gradients_exist: Whether parameters have gradients already, so that backward adds to them.

    Raises:
        TraceError: If the step returns no loss or leaves out a block.
    """
    for parameter in subject.parameters:
        parameter.grad = torch.zeros_like(parameter) if gradients_exist and parameter.requires_grad else None
    ledger = Ledger(len(subject.blocks) + 2)

    def enter(part: int, backward: bool) -> None:
        ledger.enter(part, backward=backward)

    view = subject.view
    if view is not None:
        view.group.watcher = ledger.note_collective
    walk = Walk(subject.blocks, twins, enter, recompute=recompute, mode=subject.mode, keep_values=False, view=view)
    with walk.step(), torch.enable_grad(), ledger, LinearCounter(ledger, subject.parameters):
        with subject.context():
            value = subject.call(copy_containers(batch))
        _check_all_ran(len(walk.inputs), len(subject.blocks))
        kept = ledger.holdings()
        loss = loss_of(value)
        describable = tuple(walk.answers.get(i) is not None for i in range(len(subject.blocks)))
        walk.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
    left = ledger.holdings()
    if view is not None:
        view.context.forget()
    parts = range(len(subject.blocks) + 2)
    gradients = {storage_key(p.grad) for p in subject.parameters if p.grad is not None}
    for parameter in subject.parameters:
        parameter.grad = None
    return StepCount(
        forward=tuple(ledger.forward),
        backward=tuple(ledger.backward),
        saved=tuple(sum(h.bytes for h in kept.values() if h.part == part) for part in parts),
        shared=sum(h.bytes for h in kept.values() if h.part == 0 and h.shared),
        made=tuple(sum(h.bytes for key, h in left.items() if key in gradients and h.part == part) for part in parts),
        inputs=tuple(walk.inputs),
        entering=tuple(walk.entering),
        guesses=ledger.guesses,
        describable=describable,
    )
