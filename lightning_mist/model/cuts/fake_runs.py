"""Running the user's step twice on fake parameters, and putting everything back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_mist.model.cuts.recorder import Record, Recorder, Refused
from lightning_mist.model.fakes import (
    address_of,
    fake_parameters,
    find_obstacle,
    intercepted,
    quiet_fakes,
)
from lightning_mist.model.user_code import Generators, ModuleState
from lightning_mist.tensors import batch_rows, batch_tensors, copy_batch
from lightning_mist.without_values import fake_mode

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Two runs of a step, and what they left behind."""

    records: tuple[Record, ...]  # what each run did; empty if one of them failed
    failure: str  # why, in words
    rows: tuple[int | None, ...]  # rows of each run's batch, None where they cannot be told
    states: tuple[ModuleState, ...]  # the module before, between and after the runs
    outside: tuple[str, ...]  # names of the generators outside torch that were drawn from
    batch_changed: bool


def run_twice(
    module: nn.Module,
    call: Call,
    batches: tuple[Any, Any],
    candidates: tuple[str, ...],
    kept: Callable[[], Any] = tuple,
) -> Runs:
    """Run the step on copies of two batches, all parameters being fakes; the module is left as it was.

    Where the step reads an unknown truth value it is told False, and if it then fails, True.
    """
    before, generators = ModuleState(module, with_contents=True), Generators()
    rows = tuple(batch_rows(batch) for batch in batches)
    failures = []
    for guess in (False, True):
        recorders: list[Recorder] = []
        try:
            with quiet_fakes():
                runs = _attempt(
                    *(module, call, batches, candidates, recorders), kept=kept, guess=guess, before=before, rows=rows
                )
        finally:
            for recorder in reversed(recorders):
                recorder.undo()
            before.restore()
            generators.restore()
        if runs.records:
            return runs
        failures.append(runs)
        if not any(recorder.record.reads for recorder in recorders):
            break
    return failures[0]


def _attempt(
    module: nn.Module,
    call: Call,
    batches: tuple[Any, Any],
    candidates: tuple[str, ...],
    recorders: list[Recorder],
    *,
    kept: Callable[[], Any],
    guess: bool,
    before: ModuleState,
    rows: tuple[int | None, ...],
) -> Runs:
    generators = Generators()
    originals = {id(parameter): name for name, parameter in module.named_parameters()}
    buffers = {address_of(b): name for name, b in module.named_buffers(remove_duplicate=False) if b.numel()}
    slots = fake_parameters(module, fake_mode())
    records: list[Record] = []
    states = [before]
    failure, batch_changed = "", False
    for attempt, batch in enumerate(batches):
        recorder = Recorder(slots=slots, originals=originals, buffers=buffers, guess=guess, attempt=attempt)
        recorder.know_storages(module.parameters())
        recorders.append(recorder)
        own = copy_batch(batch, with_tensors=True)
        versions = [(tensor, tensor._version) for tensor in batch_tensors(own)]
        failure = _run(module, call, own, recorder, candidates, kept)
        if failure:
            records = []
            break
        batch_changed = batch_changed or any(tensor._version != version for tensor, version in versions)
        records.append(recorder.record)
        states.append(ModuleState(module))
    return Runs(
        records=tuple(records),
        failure=failure,
        rows=rows,
        states=tuple(states),
        outside=tuple(generators.outside_torch(Generators())),
        batch_changed=batch_changed,
    )


def _run(
    module: nn.Module,
    call: Call,
    batch: Any,
    recorder: Recorder,
    candidates: tuple[str, ...],
    kept: Callable[[], Any],
) -> str:
    blocks = [module.get_submodule(name) for name in candidates]

    def watched(position: int, forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return recorder.call_block(candidates[position], forward, args, kwargs)

    try:
        recorder.know(batch_tensors(batch))
        with intercepted(blocks, watched), recorder:
            output = call(batch)
        recorder.finish((output, kept()))
    except (Exception, Refused) as error:
        return _failure(recorder.record, error, module)
    return ""


def _failure(record: Record, error: BaseException, module: nn.Module) -> str:
    obstacle = None if isinstance(error, Refused) else find_obstacle(error, module)
    if obstacle is not None:
        return f"{obstacle}; {obstacle.ways_out}"
    text = f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
    reads = [read for read in record.reads if read.source == "parameters"]
    if not reads:
        return text
    what = f"{reads[-1].function} at {reads[-1].line} reads a value that depends on parameters"
    return f"{what} ({text})" if text else what
