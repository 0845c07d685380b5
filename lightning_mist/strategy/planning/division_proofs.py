"""How batches and layers can be divided: proved with real numbers, and the same on every rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.devices import read
from lightning_mist.model import derive_contexts, derive_splits
from lightning_mist.model.fakes import convert_batch, isolated, resize_batch
from lightning_mist.plan import ModuleMap, Plan, row_slice
from lightning_mist.runtime.checks import Steady
from lightning_mist.runtime.cutting import CutRules, Result, UncuttableError, Way, best_way, prove
from lightning_mist.runtime.stage import sum_of_bits
from lightning_mist.strategy.planning.memory_budget import is_out_of_memory
from lightning_mist.strategy.ranks import Progress, of_all_ranks, on_rank_zero
from lightning_mist.strategy.training import LogRecorder, as_place, recorded_logs, results_of
from lightning_mist.tensors import batch_rows, batch_tensors, sequence_length


class _Raw(LogRecorder):
    """Keeps what is logged as it is given."""

    def log(self, name: str, value: Any, *positional: Any, **arguments: Any) -> None:
        size = arguments.get("batch_size")
        self.add(name, as_place(value), {} if size is None else {"batch_size": size})


def prove_here(
    module: Any, blocks: tuple[str, ...], call: Any, batch: Any, lap: int | None = None, most: int = 2
) -> CutRules | str:
    """How batches are cut as this rank sees it, or why not.

    Args:
        call: Runs the step on a batch.
        lap: As in :func:`~lightning_mist.runtime.cutting.proof.prove`. Some tokens of a few rows will do.
        most: Most rows of a microbatch.
    """
    recorder = _Raw()
    if lap is not None:
        if batch_rows(batch) is None or sequence_length(batch) is None:
            return "the batch's tensors do not share first dimensions of rows and second ones of several tokens"
        batch = _with_few_tokens(batch, min(most, batch_rows(batch) or 1, 2))

    def step(item: Any) -> tuple[Any, list[Result]]:
        recorder.take()
        try:
            output = call(item)
        except Exception as error:  # whatever a step says that is for one number of tokens
            if lap is None or is_out_of_memory(error):
                raise
            what = f"the step does not run on fewer tokens ({type(error).__name__}: {error})"
            raise UncuttableError(what) from error
        extras = {name: value for name, value in output.items() if name != "loss"} if isinstance(output, dict) else {}
        return output, results_of(extras, (*recorder.take(), *getattr(call, "calls", ())))

    keeping = call.keeping_calls() if hasattr(call, "keeping_calls") else nullcontext()
    with keeping, isolated(module), recorded_logs(module, recorder), _watched_metrics(module) as updated:
        answer = prove(module, blocks, step, batch, lap)
    if updated and not isinstance(answer, str):
        return f"the step updates the metric {updated[0]}, whose value does not follow from those of parts"
    return answer


def _with_few_tokens(batch: Any, rows: int) -> Any:
    """A batch of few tokens, every other of which counts; nothing else has a dimension of their number."""
    others = {size for tensor in batch_tensors(batch) for size in tensor.shape}
    length = min(sequence_length(batch) or 0, next(number for number in count(7) if number not in others))

    def counting(tensor: Tensor) -> Tensor:
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if not is_whole or tensor.dim() < 2 or not tensor.numel():
            return tensor
        is_odd = torch.arange(tensor.shape[1], device=tensor.device) % 2 > 0
        is_kept = (tensor >= 0) | is_odd.view(-1, *(1,) * (tensor.dim() - 2))
        return tensor.where(is_kept, tensor.max().clamp(min=0))

    return convert_batch(resize_batch(batch, rows, length), counting)


@contextmanager
def _watched_metrics(module: Any) -> Iterator[list[str]]:
    """Inside, it is noted which metric objects of the module are updated; known when the context ends."""
    own = ("_update_count", "_forward_cache")
    metrics = {name: item for name, item in module.named_modules() if all(hasattr(item, each) for each in own)}
    before = [item._update_count for item in metrics.values()]
    updated: list[str] = []
    yield updated
    updated += [name for name, count in zip(metrics, before, strict=True) if metrics[name]._update_count != count]


def agree(mine: CutRules | str) -> CutRules | str:
    """How batches are cut, the same on every rank, or why not, from what each rank found."""
    found: list[Any] = of_all_ranks(
        mine
        if isinstance(mine, str)
        else ((mine.site_text, mine.lap), mine.whole_tail, mine.is_of_one, dict(mine.seen), mine.slices)
    )
    refusals = [answer for answer in found if isinstance(answer, str)]
    if refusals:
        return refusals[0]
    assert isinstance(mine, CutRules)
    if any(computed != found[0][0] for computed, *_ in found):
        return "the ranks compute their losses in different ways"
    ways: dict[tuple[Any, ...], Way] = {}
    for key in dict.fromkeys(key for *_, seen, _ in found for key in seen):
        # By chance a value may have been equal for all parts of one rank.
        way = best_way(frozenset.intersection(*(seen.get(key, frozenset()) for *_, seen, _ in found)))
        if way is None:
            name = key[1] if len(key) > 1 else "the loss"
            return f"how {name} of a whole batch follows from parts differs between ranks"
        ways[key] = way
    slices = tuple(ends for ends in mine.slices if all(ends in others for *_, others in found))
    whole_tail = next((reason for _, reason, *_ in found if reason), "")
    return replace(mine, results=ways, slices=slices, whole_tail=whole_tail, is_of_one=any(each[2] for each in found))


def written_by(module: nn.Module, call: Callable[[Any], Any], batch: Any) -> list[int]:
    """A number for each trained parameter's values behind a run of a step on real ones, which are put back."""
    every = list(module.parameters())
    kept = [(p, p.data, p.data.clone()) for p in every]
    try:
        with isolated(module):
            call(batch)
        return [read(sum_of_bits(p)) for p in every if p.requires_grad]
    finally:
        for parameter, data, values in kept:
            parameter.data = data.copy_(values)


def other_masks(plan: Plan, found: ModuleMap, rules: CutRules | None) -> str | None:
    """What to say of dropout, if a plan makes it draw other masks than DDP's."""
    parts = max(row_slice(plan, rank, 0).parts for rank in range(plan.world_size))
    if rules is not None and rules.has_dropout and parts > 1:
        return "parts of a batch draw other dropout masks than the whole would under DDP: as with another seed"
    if found.drops and any(stage.mesh.num_row_peers > 1 for stage in plan.stages):
        return (
            "where ranks share layers or rows, dropout on parts draws other masks than under DDP: as with another seed"
        )
    return None


def degrees_of(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensor-parallel and the context-parallel degrees above 1 that a plan uses."""
    tensor = {stage.mesh.tensor_parallel_degree for stage in plan.stages}
    context = {stage.mesh.context_parallel_degree for stage in plan.stages}
    return tuple(sorted(tensor - {1})), tuple(sorted(context - {1}))


def with_splits(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    found: ModuleMap,
    degrees: tuple[Sequence[int], Sequence[int]],
    progress: Progress,
    tried: Callable[[Callable[[], tuple[ModuleMap, bool]]], tuple[ModuleMap, bool]],
) -> ModuleMap:
    """The map with what rank 0 found out about splitting; the same on every rank, called on all at once.

    Args:
        degrees: Tensor- and context-parallel degrees to try; without any nothing is done.
        tried: Runs work on the user's code without leaving a trace.
    """
    tensor, context = ((), degrees[1]) if found.excludes("tensor") else degrees
    if not tensor and (not context or found.excludes("context")):
        return found
    for each, what in ((tensor, "layers"), (context, "rows")):
        if each:
            progress.say(f"finding out how {', '.join(map(str, each))} devices could share {what}")

    def derive() -> tuple[ModuleMap, bool]:
        steady = Steady(next(module.parameters()).device, without_dropout=False)

        def watched(item: Any) -> Any:
            with steady:
                return call(item)

        made = derive_splits(module, watched, batch, found, tensor)
        return derive_contexts(module, watched, batch, made, context), steady.is_dropping

    made, drops = on_rank_zero(lambda: tried(derive))
    cuts = tuple(
        tuple(replace(live, sequence_dim=its.sequence_dim) for live, its in zip(cut, of_cut, strict=True))
        for cut, of_cut in zip(found.cuts, made.cuts, strict=True)
    )
    return replace(with_ways(found, made), cuts=cuts, drops=found.drops or drops)


def with_ways(found: ModuleMap, made: ModuleMap) -> ModuleMap:
    """The map with the ways to share layers and rows that one rank found, whose batch may have other sizes.

    What else it excludes all ranks have agreed on before.
    """
    return replace(
        found,
        splits=made.splits,
        unsplit=made.unsplit,
        contexts=made.contexts,
        uncontexts=made.uncontexts,
        exclusions=made.exclusions,
    )
