"""Evaluation while a plan is in place: every rank runs forwards for the others, as long as any of them has a batch.

Under data parallelism ranks evaluate each for itself: one may have more batches than another, and is waited for where a
loader ends. Here parameters, layers and stages of one rank serve the batches of all. So ranks go in rounds: each says
how far it has come and whether it has a batch; if any has, all run the forwards of the plan, those without a batch with
nothing in its place.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_mist.devices import to_device
from lightning_mist.plan import ModuleMap, of_whole_batches, replica_of, replica_ranks
from lightning_mist.runtime.batch_run import ForwardPass
from lightning_mist.runtime.communication import Microbatch, complete
from lightning_mist.runtime.parameters import present_meanwhile, works
from lightning_mist.runtime.process_state import get_random_state, set_random_state
from lightning_mist.strategy.training.batch_exchange import BatchExchange, digest_of
from lightning_mist.strategy.training.engine import Engine
from lightning_mist.strategy.training.log_records import Record, recorded_logs, replay
from lightning_mist.strategy.training.microbatch_step import Piece, moved, pieces_by_owner
from lightning_mist.strategy.training.step_guard import StepCall, StepGuard
from lightning_mist.tensors import leaves, rebuild

FINISHED = 1 << 31
"""The place of a rank that has evaluated all of its loaders."""

_SMALL = 1 << 12
"""Entries of a buffer that is read anew before every batch: what is written through its ``data`` leaves no mark."""


class Evaluator:
    """Runs an evaluated step over all ranks, loader after loader, under a guard where ranks share batches.

    Args:
        maps: Maps of the step by the loader of its batches, for those that it runs on.
    """

    def __init__(self, engine: Engine, guard: StepGuard | None, maps: Mapping[int, ModuleMap]) -> None:
        self._engine, self._transport, self._guard, self._maps = engine, engine.transport, guard, maps
        self._world = tuple(range(engine.plan.world_size))
        self._passes: dict[int, ForwardPass] = {}
        # What ranks that share batches must agree on, by rank, and the same of their buffers.
        self._notes: list[int] = []
        self._of_buffers: list[int] = []
        self._numbers: list[tuple[int, ...] | None] = []
        self._digests: dict[str, tuple[Hashable, str | None]] = {}

    @works
    def meet(self, place: int, numbers: Sequence[int] | None) -> list[tuple[int, bool]]:
        """Say how far this rank has come, and of its batch, if it has one, what :meth:`run` is given; what all say.

        Called on all at once. Numbers are the batch's own, and behind it that of its loader, or fewer.
        """
        note, count = 0 if self._guard is None else self._guard.note(), -1 if numbers is None else len(numbers)
        notice = [place, note, self._note_of_buffers(), count, numbers[0] if numbers else 0]
        said = self._transport.all_gather(torch.tensor(notice, device="cpu"), self._world)
        said.wait()
        places, self._notes, self._of_buffers, counts, batches = said.result().T.tolist()
        every = zip(places, counts, batches, strict=True)
        self._numbers = [(batch, there)[:count] if count >= 0 else None for there, count, batch in every]
        return [(there, count >= 0) for there, count in zip(places, counts, strict=True)]

    @works
    def differing_buffer(self) -> str | None:
        """The first buffer that is another on ranks that share batches, by what they said when they met; on all."""
        plan, notes = of_whole_batches(self._engine.plan), self._of_buffers
        assert plan is not None
        groups = [replica_ranks(plan, replica) for replica in range(plan.num_replicas)]
        if all(notes[rank] == notes[group[0]] for group in groups for rank in group):
            return None
        mine = {name: digest for name, (_, digest) in self._digests.items()}
        digests = self._transport.all_gather_object(mine, self._world)
        differing = (
            name for name in digests[0] for group in groups if len({digests[rank].get(name) for rank in group}) > 1
        )
        return next(differing, "of one rank")

    def _note_of_buffers(self) -> int:
        """What this rank's buffers hold; 0 if that is nobody else's, or about to be that of rank 0."""
        if self._guard is None or self._engine.buffers.is_due:
            return 0
        for name, buffer in self._engine.module.named_buffers():
            state = (buffer.data_ptr(), buffer._version)
            known = self._digests.get(name)
            if known is None or known[0] != state or buffer.numel() <= _SMALL:
                self._digests[name] = state, digest_of([buffer])
        every = repr([(name, digest) for name, (_, digest) in self._digests.items()]).encode()
        return int.from_bytes(hashlib.blake2b(every, digest_size=7).digest(), "little")

    @works
    def run(
        self,
        loader: int,
        batch: Any,
        numbers: Sequence[int] | None,
        step: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """Run the step on this rank's batch, and on those of others; called on all ranks at once.

        Args:
            numbers: Of the batch and its loader, as far as the step takes them; None if this rank has no batch.
            context: The step's, in which what it logged is logged.

        Returns:
            What the step gave for the batch, as under data parallelism; what it logged is logged. None without a batch.
        """
        engine = self._engine
        if loader not in self._passes:
            # Fakes of other stages' parameters are of the type that is computed in, which masters are not.
            with without_values(engine):
                self._passes[loader] = engine.executor.forward_pass(self._maps[loader])
        forward = self._passes[loader]
        group = replica_ranks(forward.plan, replica_of(forward.plan, engine.rank))
        complete(engine.buffers.before_forward())
        if len(group) == 1:
            rows = 0 if numbers is None else None
            alone = Microbatch(value=batch, weight=1.0, owner=engine.rank, index=0, batch_rows=rows)
            complete(engine.executor.evaluate(forward, (alone,), lambda part: step(part.value, *(numbers or ()))))
            output = engine.executor.outputs[0]
        else:
            output, records = self._run_shared(forward, group, batch, step)
            with context():  # Numbers become tensors of the precision's type, as where the step itself logs.
                output = replay(engine.module, records, output)
        engine.buffers.after_forward()
        return output

    # Where ranks share batches -----------------------------------------------------------------------------------

    def _run_shared(
        self,
        forward: ForwardPass,
        group: tuple[int, ...],
        batch: Any,
        step: Callable[..., Any],
    ) -> tuple[Any, Sequence[Record]]:
        """What the step gave for this rank's batch, and what it logged."""
        engine, guard = self._engine, self._guard
        assert guard is not None
        notes = [self._notes[rank] for rank in group]
        guard.compare(notes, lambda value: self._transport.all_gather_object(value, group))
        exchange = BatchExchange(forward.plan, engine.rank, self._transport, engine.device)
        own_state = get_random_state(engine.device)
        complete(exchange.run(batch, own_state))
        microbatches = [
            part if self._numbers[part.owner] is not None else replace(part, weight=0.0, batch_rows=0)
            for part in exchange.microbatches
        ]
        with recorded_logs(engine.module, with_metrics=True, has_loss=False) as log, guard.batch():
            call = StepCall(guard.run, log.around)

            def run(part: Microbatch) -> Any:
                call.begin(step, self._numbers[part.owner] or ())
                return call.run_part(part)

            complete(engine.executor.evaluate(forward, microbatches, run))
        executor, mine = engine.executor, dict[int, list[Piece]]()
        # Ranks that share rows have the same results: the first of them tells.
        if executor.mesh.is_last and executor.mesh.row_index == 0:
            given = {part.index: executor.outputs[part.index] for part in microbatches if part.weight}
            outputs = {index: {"output": output, "on_host": _are_on_host(output)} for index, output in given.items()}
            mine = pieces_by_owner(microbatches, outputs, log.of_parts, executor.random_states)
        every = self._transport.all_gather_object(mine, group)
        pieces = [piece for found in every for piece in found.get(engine.rank, ())]
        set_random_state(pieces[0].random_state if pieces else own_state, engine.device)
        if not pieces:
            return None, ()
        (own,) = pieces
        flags = iter(own.extras["on_host"])

        def place(node: Any) -> Any:
            return (node if next(flags) else to_device(node, engine.device)) if isinstance(node, Tensor) else None

        logged = [replace(item, value=moved(item.value, engine.device)) for item in own.records]
        return rebuild(own.extras["output"], place), logged


def _are_on_host(output: Any) -> list[bool]:
    return [leaf.device.type == "cpu" for leaf in leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def without_values(engine: Engine) -> Iterator[None]:
    """Inside, all parameters have their whole shape, the type that is computed in, and no values: to trace a step."""
    every, masters = engine.stages.every, engine.executor.masters
    types = {} if masters is None else masters.types
    shapes = {use.name: use.shape for use in engine.module_map.parameters}
    with present_meanwhile(every.values()), torch.no_grad():
        data = {name: parameter.data for name, parameter in every.items()}
        for name, parameter in every.items():
            like = data[name]
            one = torch.zeros((), dtype=types.get(name, like.dtype), device=like.device)
            parameter.data = one.expand(shapes[name])
        try:
            yield
        finally:
            for name, parameter in every.items():
                parameter.data = data[name]
