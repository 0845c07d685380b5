"""What a plan was made for, and whether it fits what is there now."""

from collections.abc import Iterable
from hashlib import sha256
from itertools import groupby
from math import prod

from lightning_mist.errors import PlanError
from lightning_mist.plan.module_map import Feature, ModuleMap
from lightning_mist.plan.plan import Plan, StagePlan
from lightning_mist.plan.rows import parts_of, proved_features

_VERSION = "version."

_NUMBERS = ("world_size", "batch_rows", "num_layers", "num_parameters")

Fingerprint = tuple[tuple[str, str], ...]
"""What a plan was made for, as ``(name, value)``. What is not there nobody said."""


def fingerprint_of(
    module_map: ModuleMap,
    *,
    world_size: int,
    batch_rows: int | None,
    precision: str,
    master_weights: bool = False,
    versions: Iterable[tuple[str, str]] = (),
) -> Fingerprint:
    """The fingerprint of a module on a number of devices.

    ``layer_kinds`` are the kinds of blocks in order, lettered by their parameters' names and shapes: ``"12A 12B"``;
    ``parameters_hash`` is a digest of all parameters' names, shapes and element types, in order.

    Args:
        versions: Names and versions of software; information only.
    """
    described = [(use.name, list(use.shape), use.dtype) for use in module_map.parameters]
    known = {
        "world_size": world_size,
        "batch_rows": batch_rows,
        "num_layers": len(module_map.blocks),
        "layer_kinds": _layer_kinds(module_map),
        "num_parameters": sum(prod(use.shape) for use in module_map.parameters),
        "parameters_hash": sha256(repr(described).encode()).hexdigest()[:16],
        "precision": f"{precision} with master weights" if master_weights else precision,
        **{_VERSION + name: version for name, version in versions},
    }
    return tuple((name, str(value)) for name, value in known.items() if value is not None)


def _layer_kinds(module_map: ModuleMap) -> str:
    """Kinds of blocks, run-length encoded. Two blocks are of one kind if their parameters look alike."""
    looks: dict[str, list[tuple[str, tuple[int, ...], str]]] = {block: [] for block in module_map.blocks}
    for use in module_map.parameters:
        for owner, attribute, _ in use.slots:
            parts = owner.split(".")
            for length in range(1, len(parts) + 1):
                block = ".".join(parts[:length])
                if block in looks:
                    name = ".".join([*parts[length:], attribute])
                    looks[block].append((name, use.shape, use.dtype))
    kinds: dict[tuple[tuple[str, tuple[int, ...], str], ...], int] = {}
    found = [kinds.setdefault(tuple(sorted(looks[block])), len(kinds)) for block in module_map.blocks]
    return " ".join(f"{len(list(run))}{_letter(kind)}" for kind, run in groupby(found))


def _letter(index: int) -> str:
    """A, B .. Z, AA, AB ..: names of kinds."""
    return (_letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def differences(planned: Fingerprint, present: Fingerprint) -> tuple[str, ...]:
    """Everything in which two fingerprints differ, as lines of text; what one of them leaves open is no difference.

    Raises:
        PlanError: If a plan has something else than a number where one belongs.
    """
    before, found = dict(planned), []
    for name in _NUMBERS:
        if not (text := before.get(name, "0")).isdecimal():
            raise PlanError(f"fingerprint.{name} = {text!r}: digits are needed; remove the entry or correct it")
    for name, now in present:
        if before.get(name, now) != now:
            made = "with version" if name.startswith(_VERSION) else "for"
            found.append(f"{name.removeprefix(_VERSION)}: the plan was made {made} {before[name]}, here it is {now}")
    return tuple(found)


def check_plan(
    plan: Plan,
    *,
    world_size: int,
    batch_rows: int | None,
    num_layers: int,
    module_map: ModuleMap,
    data_parallel_size: int | None = None,
) -> None:
    """Refuse a plan that does not fit the devices, the batch or the module.

    Args:
        batch_rows: Rows of one rank's batch; ``None`` if a batch has no rows to cut.
        data_parallel_size: How many distinct batches are loaded at once; by default one by every rank.
    """
    if plan.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} devices, but {world_size} processes run: the numbers must be equal; "
            f"set devices and num_nodes to {plan.world_size} in all, or make a plan for {world_size}"
        )
    if plan.num_layers != num_layers:
        why = "" if num_layers else "".join(f" ({reason})" for reason in module_map.excludes("pipeline"))
        raise PlanError(
            f"the plan spreads {plan.num_layers} layers, but the module has {num_layers} repeated blocks{why}: the "
            f"numbers must be equal; make a plan for this module, or edit the stages' layers to end at {num_layers}"
        )
    if plan.data_parallel_size != data_parallel_size:
        raise PlanError(
            f"the plan is for batches of {plan.num_loaders} data loaders, but there are "
            f"{data_parallel_size or world_size}: the numbers must be equal; use data_parallel_size="
            f"{plan.data_parallel_size} in the strategy, or make a new plan"
        )
    parts = parts_of(plan)
    loaders = plan.num_loaders
    if batch_rows is not None and plan.global_batch_size != batch_rows * loaders:
        raise PlanError(
            f"the plan is for global_batch_size {plan.global_batch_size}, but {loaders} ranks load batches of "
            f"{batch_rows} rows, {batch_rows * loaders} in all: the numbers must be equal; "
            + (
                f"use batch_size={plan.global_batch_size // loaders} in the loader, or make a new plan"
                if plan.global_batch_size % loaders == 0
                else "make a new plan"
            )
        )
    if batch_rows is None and max(parts) > 1:
        raise PlanError(
            f"the plan cuts every batch into {max(parts)} parts, but this batch has no common first dimension to cut; "
            "make a plan with whole batches"
        )
    last = plan.stages[-1]
    if last.microbatch_size % last.tail_chunks and not module_map.cuts_tokens:
        raise PlanError(
            f"tail_chunks = {last.tail_chunks} with microbatch_size = {last.microbatch_size}: chunks are of as many "
            "rows each where tokens cannot be cut, so their number must divide it; use 1 for none"
        )
    _check_exclusions(plan, parts, module_map)
    for index, stage in enumerate(plan.stages):
        check_split(index, stage, module_map)


def _check_exclusions(plan: Plan, parts: tuple[int, ...], module_map: ModuleMap) -> None:
    checkpointed = [stage.checkpointing.layers for stage in plan.stages]
    zero = [int(stage.zero_stage) for stage in plan.stages]
    asked: tuple[tuple[Feature, bool, str, str], ...] = (
        ("pipeline", plan.num_stages > 1, f"{plan.num_stages} stages", "use one stage"),
        *(
            (
                feature,
                True,
                f"batches cut into {max(parts)} parts",
                "keep whole batches: on every stage microbatch_size is then the rows of one rank's batch"
                + ", and tail_chunks = 1" * (plan.stages[-1].tail_chunks > 1),
            )
            for feature in proved_features(plan, module_map)
        ),
        (
            "checkpointing",
            any(checkpointed),
            f"checkpointed_layers of {', '.join(map(str, checkpointed))}",
            "use checkpointed_layers = 0 on every stage",
        ),
        (
            "selective_checkpointing",
            any(stage.checkpointing.kind == "selective" for stage in plan.stages),
            "checkpointing of 'selective'",
            "use checkpointing = 'full' on every stage",
        ),
        (
            "sharded_gradients",
            any(zero),
            f"zero_stage of {', '.join(map(str, zero))}",
            "use zero_stage = 0 on every stage",
        ),
        (
            "sharded_parameters",
            max(zero) > 2,
            f"zero_stage of {', '.join(map(str, zero))}",
            "use zero_stage = 2 or less on every stage",
        ),
    )
    for feature, used, text, way_out in asked:
        reasons = module_map.excludes(feature)
        if used and reasons:
            raise PlanError(f"the plan has {text}, which this module rules out: {'; '.join(reasons)}; {way_out}")


def check_split(index: int, stage: StagePlan, module_map: ModuleMap) -> None:
    """Refuse tensor- and context-parallel degrees, or sequence parallelism, not shown to compute the same."""
    mesh = stage.mesh
    try:
        split = module_map.split(mesh.tensor_parallel_degree)
        if mesh.context_parallel_degree > 1:
            module_map.context(mesh.context_parallel_degree)
    except PlanError as error:
        raise PlanError(f"stages[{index}].{error}") from None
    if mesh.sequence_parallel and not split.sequence:
        why = "; ".join(module_map.excludes("sequence"))
        why = why or "; ".join(note for note in split.notes if "sequence" in note)
        why = why or "this module was not shown to compute the same with it"
        raise PlanError(f"stages[{index}].sequence_parallel = True: {why}; use sequence_parallel=False")
