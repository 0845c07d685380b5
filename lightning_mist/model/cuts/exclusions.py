"""What two runs of a step say against cutting the module, in words for the user."""

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.model.cuts.blocks import container_of
from lightning_mist.model.cuts.fake_runs import Runs
from lightning_mist.model.cuts.recorder import Record
from lightning_mist.model.fakes import Read
from lightning_mist.plan.module_map import Exclusion, Feature, Reasons, exclusions_of

NO_BLOCKS = (
    "no repeated blocks were found: a pipeline cuts between the children of a ModuleList, Sequential or ModuleDict of "
    "one class; name them with the argument blocks"
)

_PIPELINE: tuple[Feature, ...] = ("pipeline",)
_SHARED: tuple[Feature, ...] = ("pipeline", "tensor")
"""What lets several ranks run one rank's batch: each would do again, or on its own, what must happen once."""

_SEEN: tuple[Feature, ...] = (*_SHARED, "shards")  # what needs to know where every parameter is used

_ALL: tuple[Feature, ...] = ("pipeline", "microbatches", "checkpointing", "tensor")


def structure_problems(
    records: tuple[Record, ...], candidates: tuple[str, ...], *, may_repeat: bool = False
) -> tuple[str, ...]:
    """Why the candidates of live containers do not run one after the other, each exactly once; empty if they do.

    Args:
        may_repeat: Whether a block may run again behind them: one that is not given to a stage by itself may.
    """
    problems = []
    for record in records:
        for name, line in () if may_repeat else record.repeated.items():
            problems.append(f"block {name} is called more than once in one step (again from {line})")
        for name, outer in record.nested.items():
            problems.append(f"block {name} runs inside block {outer}: blocks must follow one another")
    ran = {name for record in records for name in record.order}
    live = {container_of(name) for name in ran}
    missing = [
        name
        for name in candidates
        if (name in ran or container_of(name) in live)
        and any(name not in record.order and name not in record.nested for record in records)
    ]
    if missing:
        problems.append(
            f"{_list(missing, 'block')} not called in every run of the step: blocks that are dropped, at random or by "
            "a condition, cannot be divided into stages"
        )
    if not problems and any(record.order != records[0].order for record in records):
        problems.append("the blocks run in another order from step to step")
    return tuple(dict.fromkeys(problems))


def _list(names: list[str], what: str) -> str:
    """``block a is``, or ``block a and 3 others are``."""
    if len(names) == 1:
        return f"{what} {names[0]} is"
    return f"{what} {names[0]} and {len(names) - 1} other{'s' if len(names) > 2 else ''} are"


def find_exclusions(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> tuple[Exclusion, ...]:
    """Everything the runs did that a cut module, a cut batch or a recomputed block would do wrongly."""
    finders = (_reads, _buffers, _attributes, _frozen_values, _randomness, _parameters, _aliases)
    return exclusions_of(reason for finder in finders for reason in finder(module, runs, blocks))


def _reads(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    last = len(runs.records[0].order) - 1
    for record in runs.records:
        for read in record.reads:
            # Where it decides about nothing but what a layer does inside, the stage that runs the layer has values.
            is_closed = read.is_inner and read.region not in record.guessing
            is_last = read.region == last and not read.is_inner
            if read.source == "parameters" and not is_last and not is_closed:
                yield (
                    f"{read.function} at {read.line} reads a value that depends on parameters {_place(read)}",
                    _PIPELINE,
                )
    first, second = (
        [r for r in record.reads if r.source != "parameters" and not r.is_inner] for record in runs.records
    )
    if [(r.line, r.value) for r in first] != [(r.line, r.value) for r in second]:
        read = next((a for a, b in zip(first, second, strict=False) if a != b), (first or second)[-1])
        yield (
            f"{read.function} at {read.line} reads a random number, by which stages would decide differently",
            _PIPELINE,
        )


def _place(read: Read) -> str:
    if read.is_inner:
        return f"inside layer {read.region}"
    return "before the first layer" if read.region < 0 else f"between layers {read.region} and {read.region + 1}"


def _buffers(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    written: dict[str, str] = {}
    for record in runs.records:
        written |= record.buffers
    changed = [name for name in runs.states[1].changed_buffers(runs.states[2]) if name not in written]
    by_module: dict[str, list[str]] = {}
    for name in [*written, *changed]:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    modules = dict(module.named_modules())
    if by_module:
        owner, names = next(iter(by_module.items()))
        more = f", and buffers of {len(by_module) - 1} other modules" if len(by_module) > 1 else ""
        yield (
            f"the step changes buffer {names[0]} of a {type(modules[owner]).__name__}{more}: running statistics see "
            "whole batches once per step",
            _ALL,
        )


def _attributes(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    start, middle, end = runs.states
    changed = dict.fromkeys(middle.changed_attributes(end))
    changed |= dict.fromkeys(start.new_tensors(end, FakeTensor))
    modules = dict(module.named_modules())
    metrics = set()
    for owner, attribute in changed:
        if _is_metric(modules.get(owner)):
            metrics.add(owner)
            continue
        name = f"{owner}.{attribute}" if owner else attribute
        is_inner = any(owner == block or owner.startswith(f"{block}.") for block in blocks)
        features: tuple[Feature, ...] = _ALL if is_inner else (*_SHARED, "microbatches")
        yield f"the step changes the attribute {name} of the module, which would happen on one stage only", features
    for name, child in modules.items():
        if _is_metric(child) and any(True for _ in child.parameters()):
            # It runs beside the layers, where a stage may be left and where nothing is gathered.
            features = ("pipeline", "sharded_parameters", "offloaded_parameters")
            yield f"the metric {name} has parameters, which must be whole on every rank", features
    for name in sorted(metrics):
        yield f"the step updates the metric {name}, whose state would live on one stage only", _SHARED


def _is_metric(module: nn.Module | None) -> bool:
    return any(c.__name__ == "Metric" and c.__module__.startswith("torchmetrics") for c in type(module).__mro__)


def _frozen_values(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    first, second = runs.records
    for position, (one, other) in enumerate(zip(first.outputs, second.outputs, strict=False)):
        name = first.order[position]
        if one.structure != other.structure or len(one.leaves) != len(other.leaves):
            yield f"block {name} returns another structure from step to step", _PIPELINE
            continue
        for a, b in zip(one.leaves, other.leaves, strict=True):
            if a[0] != b[0] or (a[0] == "value" and a != b):
                yield (
                    f"block {name} returns the Python value {a[1]!r} in one step and {b[1]!r} in another: a stage that "
                    "skips the block would not know it",
                    _PIPELINE,
                )
                return


def _randomness(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    for name in runs.outside:
        yield f"the step draws from {name}: stages would draw different numbers; draw with torch instead", _SHARED
    if runs.batch_changed:
        yield "the step writes into the tensors of its batch, which every stage would do again", ("pipeline",)


def _parameters(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    for record in runs.records:
        for name, line in record.written_parameters.items():
            # Behind a layer, or on other rows, what was written would be gone.
            yield f"the step writes into parameter {name} (at {line})", (*_SEEN, *_ALL, "sharded_parameters", "context")
        for name, line in record.stray_parameters.items():
            yield (f"the step uses parameter {name} through a reference outside its module (at {line})", _SEEN)
        for problem in record.problems:
            yield problem, _SHARED
        for name, line in list(record.closures.items())[:1]:
            yield (
                f"block {name} reads a tensor that is not one of its arguments (at {line}), which may have changed "
                "when the block is recomputed",
                ("checkpointing",),
            )


def _aliases(module: nn.Module, runs: Runs, blocks: frozenset[str]) -> Reasons:
    """Tensors that share memory across a cut, one of which is written to after it."""
    record = runs.records[0]
    last_write: dict[int, int] = {}
    for storage, region in record.writes:
        last_write[storage] = max(region, last_write.get(storage, -1))
    for cut in range(1, len(record.order)):
        seen: set[int] = set()
        for value in record.values.values():
            if not value.defined < cut <= value.last_used or last_write.get(value.storage, -1) < cut:
                continue
            if value.storage in seen:
                yield (
                    f"two tensors that share memory are used before and after layer {cut} begins, and one of them is "
                    "written to after that",
                    _PIPELINE,
                )
            seen.add(value.storage)
