"""What will it need: the memory of every device under a plan, before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.estimate.allocator import parse_allocator_settings
from lightning_mist.estimate.closed_form import closed_spec, with_second_opinion
from lightning_mist.estimate.estimate_data import MemoryEstimate
from lightning_mist.estimate.plan_estimate import estimate_plan, limit_of
from lightning_mist.estimate.stage_estimates import Estimator
from lightning_mist.estimate.transformer_sizes import module_dims
from lightning_mist.hardware import Cluster, parse_cluster, single
from lightning_mist.hardware.catalog import capability_of
from lightning_mist.model import (
    DeviceOperators,
    derive_contexts,
    derive_splits,
    describe_optimizer,
    device_operators,
    map_module,
    optimizer_class,
    optimizer_to_describe,
    trace_model,
)
from lightning_mist.model.sources import parameter_dtype, precision_context
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, load, plan_of
from lightning_mist.tensors import batch_rows, sequence_length, slice_rows


def estimate_memory(
    module_or_spec: nn.Module | ModelSpec,
    batch: Any = None,
    plan: Plan | str | Path | None = None,
    cluster: Cluster | str = "1xL4",
    *,
    call: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None = None,
    precision: str = "32-true",
    memory_limit: str | int | None = None,
    allocator: str = "",
    advise: bool = True,
) -> MemoryEstimate:
    """What a plan needs of the memory of every device. The step runs on tensors without values only.

    Args:
        module_or_spec: The module, or what :func:`~lightning_mist.trace_model` said of it.
        batch: A batch for its step; not needed for a specification.
        plan: A plan, or the path of a plan file. By default every device holds the whole module and takes such a batch.
        cluster: The machine, or text such as ``"4x8xL4"``.
        call: Runs the module's step on a batch; by default its ``training_step``.
        optimizer: An optimizer of the module, or a class in ``torch.optim`` or its name. By default what the module's
            ``configure_optimizers`` makes, or AdamW if it makes none.
        precision: Lightning's name of the precision. For a mixed one the step runs under autocast. For a true one the
            module must already be in it.
        memory_limit: Bytes of each device that may be used, or text such as ``"22GiB"``; by default its memory.
        allocator: Settings of torch's caching allocator as in ``PYTORCH_CUDA_ALLOC_CONF``, such as
            ``"expandable_segments:True"``; nothing for its defaults.
        advise: Whether to look for what would make it fit, if it does not.

    Raises:
        PlanError: If the plan does not fit the module or the machine.
        TraceError: If the module cannot be traced, nor has a configuration whose closed form could take its place.
        ValueError: If the limit is no size or above the device's, or the allocator has no such setting.
        TypeError: If an argument is of none of these types.
    """
    _check_types(module_or_spec, plan, cluster, optimizer, allocator)
    machine = single(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "an estimate")
    given = load(plan) if isinstance(plan, (str, Path)) else plan
    source = "traced"
    if isinstance(module_or_spec, ModelSpec):
        spec = module_or_spec
    else:
        degrees = [] if given is None else [stage.mesh.tensor_parallel_degree for stage in given.stages]
        kind = machine.device.kind
        named = optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
        trained_by, notes = optimizer_to_describe(module_or_spec, named, precision_context(precision))
        try:
            operators = device_operators(kind, capability=capability_of(machine.device.name))
            spec = _trace(module_or_spec, batch, degrees, operators, call, trained_by, precision)
        except TraceError as error:
            spec = _untraced(module_or_spec, batch, degrees, kind, trained_by, precision, error)
            source = f"closed form ({error})"
        spec = replace(spec, notes=(*spec.notes, *notes))
    if given is None:
        count = machine.world_size
        given = plan_of(spec.num_layers, world_size=count, global_batch_size=count * spec.batch_rows)
    settings = parse_allocator_settings(allocator, machine.device.memory_bytes)
    estimator = Estimator(spec, machine, limit_of(machine, memory_limit), source, allocator=settings)
    return estimate_plan(estimator, given, advise=advise)


def _trace(
    module: nn.Module,
    batch: Any,
    degrees: Sequence[int],
    operators: DeviceOperators,
    call: Callable[[Any], Any] | None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    precision: str,
) -> ModelSpec:
    """What the module costs, split over these degrees too."""
    context = precision_context(precision)
    _refuse_other_type(module, parameter_dtype(precision), precision)
    plain = call or _training_step(module)

    def step(item: Any) -> Any:
        # Under the modes of a trace torch would never compile again what the user compiles.
        with torch.compiler.set_stance("force_eager"), context():
            return plain(item)

    asked = sorted({*degrees} - {1})
    spec = traced_spec(
        module, batch, step, degrees=asked, optimizer=optimizer, precision=precision, operators=operators
    )
    return with_second_opinion(spec.evenly(), module, operators.name)


def traced_spec(
    module: nn.Module,
    batch: Any,
    call: Callable[[Any], Any],
    *,
    degrees: Sequence[int],
    contexts: Sequence[int] = (),
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    precision: str,
    operators: DeviceOperators,
    tell: Callable[[str], object] = lambda text: None,
) -> ModelSpec:
    """What a step of a module costs, split over these tensor- and context-parallel degrees too.

    Args:
        call: Runs the step on a batch.
        tell: Is told what is being done.
    """
    rows = batch_rows(batch)
    # Where a batch grows is seen by comparing two batches.
    smaller = slice_rows(batch, 0, rows - 1) if rows is not None and rows > 1 else None
    found = map_module(module, call, batch, second_batch=smaller)
    if degrees:
        tell(f"finding out how {', '.join(map(str, degrees))} devices could share layers")
        found = derive_splits(module, call, batch, found, degrees)
    if contexts:
        tell(f"finding out how {', '.join(map(str, contexts))} devices could share rows")
        found = derive_contexts(module, call, batch, found, contexts)
    return trace_model(
        module, batch, call=call, module_map=found, optimizer=optimizer, precision=precision, device_kind=operators
    )


def _untraced(
    module: nn.Module,
    batch: Any,
    degrees: Sequence[int],
    device_kind: str,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    precision: str,
    error: TraceError,
) -> ModelSpec:
    """The closed form of a module that cannot be traced, if it says its sizes; the error otherwise."""
    length, rows = sequence_length(batch), batch_rows(batch)
    dims = None if length is None or rows is None else module_dims(module, length)
    if dims is None or length is None or rows is None:
        raise error
    return closed_spec(
        dims,
        optimizer=describe_optimizer(optimizer or torch.optim.AdamW, device_kind=device_kind),
        precision=precision,
        rows=rows,
        sequence_length=length,
        degrees=degrees,
        device_kind=device_kind,
        name=type(module).__name__,
    )


def _check_types(module_or_spec: Any, plan: Any, cluster: Any, optimizer: Any, allocator: Any) -> None:
    """Refuse arguments of types that say nothing, before any of them is used."""
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    known_optimizer = optimizer is None or is_class or isinstance(optimizer, (torch.optim.Optimizer, str))
    source, plans = isinstance(module_or_spec, (nn.Module, ModelSpec)), isinstance(plan, (Plan, str, Path, type(None)))
    checks: tuple[tuple[str, Any, bool, str], ...] = (
        ("module_or_spec", module_or_spec, source, "a module, or what trace_model returned"),
        ("plan", plan, plans, "a Plan, as plan_of makes one, or the path of a plan file"),
        ("cluster", cluster, isinstance(cluster, (Cluster, str)), "a Cluster, or text such as '1x8xL4'"),
        (
            "optimizer",
            optimizer,
            known_optimizer,
            "an optimizer of the module, a class such as torch.optim.AdamW, or its name 'AdamW'",
        ),
        ("allocator", allocator, isinstance(allocator, str), "text such as 'expandable_segments:True', '' for nothing"),
    )
    for name, value, is_right, wanted in checks:
        if not is_right:
            raise TypeError(f"{name} = {value!r} is of type {type(value).__name__}: give {wanted}")


def _refuse_other_type(module: nn.Module, wanted: torch.dtype | None, precision: str) -> None:
    found = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if wanted is not None and found - {wanted}:
        raise ValueError(
            f"precision {precision!r} with parameters of {', '.join(sorted(map(str, found)))}: Lightning converts the "
            f"module before it trains; do the same, module.to({wanted})"
        )


def _training_step(module: nn.Module) -> Callable[[Any], Any]:
    step = getattr(module, "training_step", None)
    if not callable(step):
        raise ValueError(
            f"{type(module).__name__} has no training_step: give call=, a function that runs one step on a batch and "
            "returns its loss"
        )
    return lambda batch: step(batch, 0)
