"""What the network costs that a command is for."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import Precision, oldest_capability
from lightning_mist.cli.output import say, told
from lightning_mist.errors import MistError

if TYPE_CHECKING:
    from torch import nn

    from lightning_mist.estimate.transformer_sizes import TransformerDims
    from lightning_mist.hardware import AnyCluster
    from lightning_mist.model import ModelSpec, OptimizerSpec

LONG_ROWS = 32_768
"""Tokens of a row from which on devices may share it unasked: Llama 3 was trained without context parallelism on rows
of 8,192 tokens, and with 16 devices sharing each of 131,072 (Dubey et al., 2024, table 4)."""

LONG_DEGREES = (2, 4, 8)
"""In how many parts rows are shared then."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """A network as it is asked for on the command line.

    Attributes:
        model: A preset such as llama-7b, the path of a Hugging Face config.json, or package.module:function, whose
            function returns a module with a training_step and a batch for it.
        seq_len: Tokens per row, for presets and configurations.
        precision: Lightning's name of the precision, such as bf16-mixed; by default bf16-true with master weights where
            all devices multiply in bfloat16, else 32-true.
        master_weights: Whether weights in bfloat16 have masters in float32, which are updated.
        optimizer: Class in torch.optim, by its default options; else what configure_optimizers makes, or AdamW.
        trace: Trace a preset too, which takes longer, instead of describing it by its sizes.
        lora_rank: Freeze the network and train adapters of this width alone (LoRA).
        lora_targets: Beside which linear layers they are, such as "q_proj,k_proj,v_proj,o_proj"; by default those of
            attention's queries and values.
    """

    model: str
    seq_len: int | None = None
    precision: str | None = None
    master_weights: bool = False
    optimizer: str | None = None
    trace: bool = False
    lora_rank: int | None = None
    lora_targets: str = ""

    def __post_init__(self) -> None:
        if self.lora_targets and self.lora_rank is None:
            raise ValueError(f"lora_targets = {self.lora_targets!r} without lora_rank: give --lora-rank 16, too")

    def on(self, machine: "AnyCluster", precision: Precision, **more: Any) -> "NetworkRequest":
        """The request for it on a machine, in a precision that was settled."""
        settled = {"precision": precision.name, "master_weights": precision.master_weights}
        known = {"device_kind": machine.kind, "capability": oldest_capability(machine)}
        return NetworkRequest(**{**asdict(self), **settled, **known, **more})


@dataclass(frozen=True, kw_only=True)
class NetworkRequest(NetworkOptions):
    """A network for a machine.

    Attributes:
        degrees: Tensor-parallel degrees to look at.
        contexts: Context-parallel degrees to look at; None for :data:`LONG_DEGREES` where a network that is described
            has rows of :data:`LONG_ROWS` or more.
    """

    precision: str
    rows: int
    degrees: tuple[int, ...]
    device_kind: str
    contexts: tuple[int, ...] | None = None
    capability: tuple[int, int] | None = None


def describe_network(request: NetworkRequest) -> "ModelSpec":
    """What the network costs: of presets by their sizes, where traces of their family are at hand; else traced."""
    return _with_masters(_described(request), request)


def _with_masters(spec: "ModelSpec", request: NetworkRequest) -> "ModelSpec":
    from lightning_mist.model import with_master_weights

    return with_master_weights(spec) if request.master_weights else spec


def _described(request: NetworkRequest) -> "ModelSpec":
    from lightning_mist.model.presets import PRESETS, check_length, check_name, check_precision

    check_precision(request.precision)
    check_name(request.model)
    if request.trace or request.lora_rank is not None or request.model not in PRESETS:
        return trace_network(request)
    from lightning_mist.model.presets import KNOWN_OPTIMIZERS, preset_spec

    length = check_length(request.model, request.seq_len)
    name = request.optimizer or "AdamW"
    found = preset_spec(
        PRESETS[request.model],
        name=request.model,
        precision=request.precision,
        rows=request.rows,
        length=length,
        degrees=request.degrees,
        contexts=_contexts(request, length),
        optimizer=KNOWN_OPTIMIZERS.get(name) or _optimizer(name, request.device_kind),
        device_kind=request.device_kind,
        capability=request.capability,
    )
    if found is None:
        say(
            f"{request.model} in {request.precision} has to be traced for {_devices(request)}: its sizes alone do not "
            "say what its operators keep there"
        )
        return trace_network(request)
    assumed = () if request.optimizer is not None else ("no optimizer was given: AdamW's needs are assumed",)
    how = f"{request.model} is described by its sizes, from traces of its family; --trace traces it itself"
    return replace(found, notes=(*found.notes, *assumed, how))


def _contexts(request: NetworkRequest, length: int) -> tuple[int, ...]:
    """Context-parallel degrees to look at of a network that is described by its sizes."""
    if request.contexts is None:
        return LONG_DEGREES if length >= LONG_ROWS else ()
    return request.contexts


def _devices(request: NetworkRequest) -> str:
    """The devices that a network is for, by what tells apart how they compute."""
    if request.device_kind != "cuda" or request.capability is None:
        return f"{request.device_kind} devices"
    return f"devices of compute capability {'.'.join(map(str, request.capability))}"


def _optimizer(name: str, device_kind: str) -> "OptimizerSpec":
    from lightning_mist.model import describe_optimizer, optimizer_class

    return describe_optimizer(optimizer_class(name), device_kind=device_kind)


def trace_network(request: NetworkRequest) -> "ModelSpec":
    """What the network costs, split over the tensor-parallel degrees too where that can be.

    Found out in a process of its own: it runs the user's code, on tensors without values.
    """
    from lightning_mist.model.child_process import BUDGET, RunClock, run_apart

    with told("looking at the network, in a process of its own"):
        try:
            return run_apart(_trace, request, tell=say, clock=RunClock(4 * BUDGET.most_seconds))
        except (MistError, ValueError):
            raise
        except Exception as error:
            if not request.model.endswith(".json"):
                raise
            # None of it is the user's own code: what is wrong is said by the sizes.
            raise ValueError(
                f"model {request.model!r}: the step that transformers makes of it fails with {type(error).__name__} "
                f"({error}); mend the configuration, or write package.module:function"
            ) from error


def _trace(request: NetworkRequest, *, tell: Callable[[str], None]) -> "ModelSpec":
    from lightning_mist.estimate.closed_form import with_second_opinion
    from lightning_mist.estimate.module_estimate import traced_spec
    from lightning_mist.model import device_operators, optimizer_class, optimizer_to_describe
    from lightning_mist.model.sources import open_model, precision_context

    named = None if request.optimizer is None else optimizer_class(request.optimizer)
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that the user's own modules are found
    # Where a batch grows is seen by comparing two of them, so one row is not enough.
    source = open_model(
        request.model,
        batch_rows=max(2, request.rows),
        sequence_length=request.seq_len,
        precision=request.precision,
        change=partial(_adapted, request),
    )
    tell(f"tracing {source.name}")
    optimizer, notes = optimizer_to_describe(source.module, named, precision_context(request.precision))
    spec = traced_spec(
        source.module,
        source.batch,
        source.call,
        degrees=request.degrees,
        contexts=request.contexts or (),
        optimizer=optimizer,
        precision=request.precision,
        operators=device_operators(request.device_kind, capability=request.capability),
        tell=tell,
    )
    spec = replace(spec.evenly(), name=source.name, notes=(*spec.notes, *notes))
    return with_second_opinion(spec, source.module, request.device_kind)


def _adapted(request: NetworkRequest, module: "nn.Module") -> "nn.Module":
    from lightning_mist.model.sources import with_adapters

    if request.lora_rank is None:
        return module
    names = [name.strip() for name in request.lora_targets.split(",") if name.strip()]
    return with_adapters(module, request.lora_rank, names)


def closed_network(request: NetworkRequest) -> "ModelSpec":
    """What a transformer costs by its sizes alone."""
    if request.lora_rank is not None:
        raise ValueError("closed_form with lora_rank: sizes alone say nothing of adapters; leave --closed-form out")
    from lightning_mist.estimate.closed_form import closed_spec
    from lightning_mist.model.presets import check_length, check_name

    model = request.model
    check_name(model)
    seq_len = check_length(model, request.seq_len)
    spec = closed_spec(
        _dims(model, seq_len),
        optimizer=_optimizer(request.optimizer or "AdamW", request.device_kind),
        precision=request.precision,
        rows=request.rows,
        sequence_length=seq_len,
        degrees=request.degrees,
        device_kind=request.device_kind,
        name=model,
    )
    return _with_masters(spec, request)


def _dims(model: str, seq_len: int) -> "TransformerDims":
    """The sizes that a preset or a configuration file states."""
    from lightning_mist.estimate.transformer_sizes import dims_of, shape_dims
    from lightning_mist.model.presets import PRESETS, read_configuration

    if model in PRESETS:
        return shape_dims(PRESETS[model], seq_len)
    if ":" not in model:
        try:
            return dims_of(read_configuration(Path(model)))
        except ValueError as error:
            raise ValueError(f"model {model!r}: {error}") from error
    raise ValueError(f"model {model!r}: a closed form needs a preset or a Hugging Face config.json; trace it instead")
