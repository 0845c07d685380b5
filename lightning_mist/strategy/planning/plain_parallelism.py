"""When only plain data parallelism can serve, and when it is enough: nothing else is worth the trust that it costs.

Every other plan does the same arithmetic on the same devices. What it can save of a step is at most the gradients'
reduction, a share of the optimizer's step, and what layers take longer for a batch than for its parts. Where memory
does not ask for anything, nothing is searched if that is too short to be told from the noise of a step, too small a
share of it to be told from what predictions are wrong by, or less than a second of all steps to come.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lightning_mist.errors import MistError, TraceError
from lightning_mist.hardware import Cluster, HardwareProfile, catalog_profile, load_profile
from lightning_mist.model import LayerSeconds, OptimizerRule, examine_optimizer
from lightning_mist.plan import Exclusion, Feature, ModuleMap, Plan, Predicted, plan_of
from lightning_mist.plan.module_map import OFFLOADS, exclusions_of
from lightning_mist.runtime.stage import Talk, watched_processes
from lightning_mist.strategy.planning.trial_step import tried
from lightning_mist.strategy.ranks import of_all_ranks
from lightning_mist.units import format_seconds

MANUAL = "automatic_optimization=False: the module calls backward and step itself"

OFFERED = (
    f"{MANUAL}, for which no plan is searched; one that is given (plan=) may shard optimizer state and gradients "
    "(zero_stage 1 or 2), recompute layers and offload optimizer state"
)

LEAST_GAIN = 0.05
"""Share of a plain step that another plan must save by prediction. Predictions of steps lie 8% from what is measured on
average, most of which plans of one network have in common; pairs less than 5% apart are ordered no better than by
chance (docs/time-model.md)."""

_TOO_LITTLE = f"less than {LEAST_GAIN:.0%} cannot be told from what predictions are wrong by"

LEAST_SECONDS = 2e-3
"""What any other plan could save at most, below which nothing is searched: steps of a process scatter by as much."""

LEAST_SECONDS_OF_RUN = 1.0
"""What any other plan could save of a whole run at most, below which nothing is searched: nobody notices."""

LARGEST_SHARE = 0.5
"""Of the memory that may be used: what a plain step needs by a rough count, so that it certainly fits."""

STATES = 4
"""Weights, gradients, and two moments: what parameters are counted as before anything is known of the optimizer."""

STATES_WITH_MASTERS = 9
"""The same in bytes of 16-bit weights: these, and masters, gradients and two moments of twice as many."""

_PASSES = 8
"""How often an optimizer goes over its parameters' bytes; AdamW reads four times and writes three."""

_CALLBACKS_THAT_TRAIN = ("LearningRateFinder", "BatchSizeFinder")
"""Of Lightning's own: they run parts of training inside of the fit, from loaders made anew."""

_HOOKED = "a hook on the LightningModule itself runs around each of its steps, which only its own wrapper calls"


def at_once_reason(trainer: Any) -> str | None:
    """Why this run is trained plainly without looking at a batch, if so."""
    loop = trainer.fit_loop
    for name in ("fast_dev_run", "barebones", "overfit_batches"):
        if getattr(trainer, name):
            return f"{name}={getattr(trainer, name)}"
    if trainer.limit_train_batches == 0:
        return "limit_train_batches=0"
    if _hooked(trainer.lightning_module, recurse=False):
        return _HOOKED
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS_THAT_TRAIN:
                return f"callback {type(callback).__name__} trains before the fit does"
    is_resumed = bool(getattr(trainer._checkpoint_connector, "_loaded_checkpoint", None))
    if loop.epoch_progress.current.processed > 0 and not is_resumed:
        return "the fit goes on from an earlier one of this trainer"
    return None


def plain_plan(world_size: int, rows: int | None, layers: int) -> Plan:
    """The plan that is plain data parallelism."""
    return plan_of(layers, world_size=world_size, global_batch_size=(rows or 1) * world_size)


def most_to_save(
    parameters: Sequence[torch.nn.Parameter],
    cluster: Cluster,
    directory: Any,
    update: float = 0.0,
    reduction: float = 0.0,
) -> float | None:
    """Seconds of a plain step that any other plan could save at most; None if nothing is known of the machine.

    Args:
        directory: Where profiles are kept: a measured one counts, else the catalog's.
        update: Measured seconds of the optimizer's step per byte of parameters; 0 if it was not measured.
        reduction: Measured seconds of a reduction per byte; 0 if it was not measured.
    """
    from lightning_mist.cost.time import collective_seconds

    if cluster.world_size == 1:
        return 0.0  # nothing is reduced, and nobody shares the optimizer's step
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    try:
        profile = load_profile(directory, cluster)[0] or catalog_profile(cluster)
        reduced = float(
            collective_seconds(profile, "all_reduce", cluster.world_size, cluster.num_nodes, float(trained))
        )
    except MistError:
        return None
    return max(reduced, trained * reduction) + trained * max(update, _PASSES / profile.memory_bytes_per_second)


def steps_to_come(trainer: Any) -> float:
    """Optimizer steps of this fit, once its loaders are made; infinite if it has no end of its own."""
    try:
        return float(trainer.estimated_stepping_batches)
    except Exception:  # Lightning's own, of either copy: accumulation that changes with epochs cannot be counted
        return math.inf


def enough(
    *,
    fits: Callable[[], bool],
    saved: float | None = None,
    steps: float = math.inf,
    seconds: Sequence[LayerSeconds] | None = None,
    predicted: tuple[Predicted, Predicted] | None = None,
) -> str | None:
    """Why plain data parallelism is enough by what is known so far, if it is: it fits, and others save too little.

    Args:
        fits: Whether it fits; asked only where others save too little.
        saved: Seconds of a plain step that any other plan could save at most, beside what layers take; None if nothing
            is known of that.
        steps: Optimizer steps to come.
        seconds: Measured seconds of layers; None before they are.
        predicted: What is predicted of the fastest plan that was found, and of plain data parallelism; None before
            anything was searched.
    """
    reason, end = None, ", and it fits"
    if predicted is not None:
        fastest, plain = (item.step_seconds for item in predicted)
        if (gain := 1 - fastest / plain) < LEAST_GAIN:
            reason, end = f"the fastest plan would save {max(gain, 0.0):.1%} of a step; {_TOO_LITTLE}", ""
    elif saved is None:
        return None
    elif seconds is None:
        if saved <= LEAST_SECONDS:
            reason = f"no other plan could save more than {format_seconds(saved)} of a step"
        elif saved * steps <= LEAST_SECONDS_OF_RUN:
            reason = f"no other plan could save more than {format_seconds(saved * steps)} of {steps:.0f} steps"
    elif whole := sum(_whole_seconds(item)[-1] for item in seconds):
        least = sum(min(_whole_seconds(item)) for item in seconds)
        if (share := (whole - least + saved) / (whole + saved)) < LEAST_GAIN:
            reason = f"no other plan could save more than {share:.1%} of a step; {_TOO_LITTLE}"
    return reason + end if reason is not None and fits() else None


def sharing_seconds(profile: HardwareProfile, found: ModuleMap, seconds: Sequence[LayerSeconds], degree: int) -> float:
    """Seconds of a step that devices lose at least by sharing layers, which take these for one process's batch.

    They take the rows of all of them. Each block is shared out, so that its result is put together in forward and its
    gradient in backward; or it is whole, so that every device computes it for all rows.
    """
    from lightning_mist.cost.time import collective_seconds

    passed = [
        math.prod(live.shape) * getattr(torch, live.dtype).itemsize
        for cut in found.cuts
        for live in cut
        if live.requires_grad and live.batch_dim is not None
    ]
    payload = float(degree * min(passed, default=0))

    def taken(*operations: str) -> float:
        return sum(float(collective_seconds(profile, name, degree, 1, payload)) for name in operations)

    exchanges = 2 * min(taken("all_reduce"), taken("reduce_scatter", "all_gather"))
    return sum(
        len(item.layers) * min(exchanges, (degree - 1) * (item.forward[-1] + item.backward[-1])) for item in seconds
    )


def _whole_seconds(item: LayerSeconds) -> list[float]:
    """What all layers of a kind take for as many rows as were measured at most, by parts of each size."""
    return [
        max(1, len(item.layers)) * item.rows[-1] / rows * (forward + backward)
        for rows, forward, backward in zip(item.rows, item.forward, item.backward, strict=True)
    ]


_HOST = torch.device("cpu")

_WHOLE_MODULE_CALLBACKS = {
    "WeightAveraging": "it averages the whole module on every rank",
    "StochasticWeightAveraging": "it averages the whole module on every rank",
    "ModelPruning": "it masks parameters of the whole module",
    "BaseFinetuning": "it changes the optimizer's parameters while training",
}
"""Lightning callbacks that read or change all parameters on every rank, and what they do."""


def whole_module_reason(
    trainer: Any, optimizers: list[Any], device: torch.device = _HOST, *, manual: str | None = MANUAL
) -> str | None:
    """Why only plain data parallelism can serve this module, its optimizers and the trainer's callbacks, if so.

    Args:
        manual: Why a module that steps by itself may not be trained by anything else; None if it may.
    """
    is_manual = not trainer.lightning_module.automatic_optimization
    if is_manual and manual is not None:
        return manual
    reason = optimizer_reason(optimizers, device, may_be_several=is_manual)
    if reason is not None:
        return reason
    if _hooked(trainer.lightning_module, recurse=False):
        return _HOOKED
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _WHOLE_MODULE_CALLBACKS:
                return f"callback {type(callback).__name__}: {_WHOLE_MODULE_CALLBACKS[cls.__name__]}"
    return None


def _hooked(module: Any, *, recurse: bool = True) -> list[str]:
    """The modules with hooks around their calls, by name, each as often as it has some."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parts = module.named_modules() if recurse else [("", module)]
    return [name for name, part in parts for kind in kinds for _ in getattr(part, kind)]


def uneven_hooks(module: Any) -> tuple[Exclusion, ...]:
    """What hooks rule out that are not on the same modules of all ranks; called on all at once."""
    first, *others = of_all_ranks(_hooked(module))
    if all(other == first for other in others):
        return ()
    reason = "modules have hooks on some ranks only, as a logger's watch puts there, and others do not wait for those"
    return exclusions_of([(reason, ("pipeline", "tensor", "context", "sharded_parameters", "offloaded_parameters"))])


def optimizer_reason(optimizers: list[Any], device: torch.device, *, may_be_several: bool = False) -> str | None:
    """Why only plain data parallelism can serve optimizers, if so."""
    if not optimizers or (len(optimizers) > 1 and not may_be_several):
        return f"there are {len(optimizers)} optimizers; sharding and stages step exactly one"
    return next((reason for item in optimizers if (reason := _reason_of(item, device)) is not None), None)


def _reason_of(optimizer: Any, device: torch.device) -> str | None:
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS calls the step several times"
    _RULES.pop(optimizer, None)
    try:
        return optimizer_rule(optimizer, device).coupled
    except TraceError as error:
        return f"whether {type(optimizer).__name__} looks at several parameters cannot be found out: {error}"


_RULES: WeakKeyDictionary[Any, dict[torch.dtype | None, OptimizerRule]] = WeakKeyDictionary()
"""What was found out last, by type of parameters: of each planning when it asks :func:`optimizer_reason`."""


def optimizer_rule(optimizer: Any, device: torch.device, dtype: torch.dtype | None = None) -> OptimizerRule:
    """What an optimizer looks at together, on parameters of a type if they will have another than now."""
    known = _RULES.setdefault(optimizer, {})
    if dtype not in known:
        with torch.compiler.set_stance("force_eager"):
            known[dtype] = tried(lambda: _examined(optimizer, dtype), device)
    return known[dtype]


def _examined(optimizer: Any, dtype: torch.dtype | None) -> OptimizerRule:
    said: dict[Talk, str] = {}

    def notice(kind: Talk, what: str) -> bool:
        said.setdefault(kind, f"asks which process it runs in ({what})" if kind == "rank" else f"calls {what}")
        return True

    with watched_processes(notice):
        rule = examine_optimizer(optimizer, dtype=dtype)
    what = said.get("collective") or said.get("rank")
    return replace(rule, coupled=f"{rule.name} shares its step with other processes: it {what}") if what else rule


def optimizer_exclusions(rule: OptimizerRule) -> tuple[Exclusion, ...]:
    """What an optimizer rules out beside that, and why."""
    # Whatever of it is in host memory, an update goes unit by unit.
    updated = tuple(OFFLOADS[kind] for kind in ("parameters", "gradients", "optimizer"))
    reasons: tuple[tuple[str | None, tuple[Feature, ...]], ...] = ((rule.whole, ("tensor",)), (rule.counted, updated))
    return exclusions_of((reason, features) for reason, features in reasons if reason is not None)


def with_whole_blocks(found: ModuleMap, optimizer: Any, rule: OptimizerRule, names: Mapping[Any, str]) -> ModuleMap:
    """The map without the ways to share layers that cut what an optimizer looks at together."""
    shapes, unsplit = {use.name: use.shape for use in found.parameters}, dict(found.unsplit)
    grouped = zip(optimizer.param_groups, rule.groups, strict=False)
    rules = {names.get(parameter): own for group, own in grouped for parameter in group["params"]}
    for split in found.splits:
        cut = [each for each in split.parameters if each.name in rules]
        reasons = [rules[each.name].refusal(shapes[each.name], each, split.degree) for each in cut]
        if first := next(filter(None, reasons), None):
            unsplit[split.degree] = f"{rule.name}: {first}"
    splits = tuple(split for split in found.splits if split.degree not in unsplit)
    return replace(found, splits=splits, unsplit=tuple(sorted(unsplit.items())))
