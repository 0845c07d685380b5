"""What only plain data parallelism can serve, and plans that a memory limit rules out."""

from typing import Any

import torch

from lightning_mist.errors import TraceError
from lightning_mist.model import counting_reason, coupling_reason, whole_tensor_reason
from lightning_mist.plan import Exclusion, Feature
from lightning_mist.plan.module_map import OFFLOADS
from lightning_mist.strategy.planning.trials import tried

_HOST = torch.device("cpu")

BUT_PLAIN: tuple[Feature, ...] = (
    "pipeline",
    "microbatches",
    "checkpointing",
    "tensor",
    "sequence",
    "sharded_gradients",
    "sharded_parameters",
    *OFFLOADS.values(),
)
"""All that plans can do beside plain data parallelism."""

_WHOLE_MODULE_CALLBACKS = {
    "WeightAveraging": "it averages the whole module on every rank",
    "StochasticWeightAveraging": "it averages the whole module on every rank",
    "ModelPruning": "it masks parameters of the whole module",
    "BaseFinetuning": "it changes the optimizer's parameters while training",
}
"""Lightning callbacks that read or change all parameters on every rank, and what they do."""


def whole_module_reason(trainer: Any, optimizers: list[Any], device: torch.device = _HOST) -> str | None:
    """Why only plain data parallelism can serve this module, its optimizers and the trainer's callbacks, if so."""
    if not trainer.lightning_module.automatic_optimization:
        return "automatic_optimization=False: the module calls backward and step itself"
    reason = _optimizer_reason(optimizers, device)
    if reason is not None:
        return reason
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _WHOLE_MODULE_CALLBACKS:
                return f"callback {type(callback).__name__}: {_WHOLE_MODULE_CALLBACKS[cls.__name__]}"
    return None


def _optimizer_reason(optimizers: list[Any], device: torch.device) -> str | None:
    if len(optimizers) != 1:
        return f"configure_optimizers returns {len(optimizers)} optimizers; sharding and stages step exactly one"
    if isinstance(optimizers[0], torch.optim.LBFGS):
        return "LBFGS calls the step several times"
    try:
        return tried(lambda: coupling_reason(optimizers[0]), device)
    except TraceError as error:
        return f"whether {type(optimizers[0]).__name__} looks at several parameters cannot be found out: {error}"


def optimizer_exclusions(optimizer: Any) -> tuple[Exclusion, ...]:
    """What an optimizer rules out beside that, and why."""
    whole, counting = whole_tensor_reason(optimizer), counting_reason(optimizer)
    reasons: list[tuple[Feature, str]] = [] if whole is None else [("tensor", whole)]
    # Whatever of it is in host memory, an update goes unit by unit.
    updated = () if counting is None else ("parameters", "gradients", "optimizer")
    reasons += [(OFFLOADS[kind], str(counting)) for kind in updated]
    return tuple(Exclusion(feature=feature, reason=reason) for feature, reason in reasons)


def refuse_what_is_not_there(save_distributed_checkpoint: bool) -> None:
    """Refuse arguments of the strategy that ask for what it cannot do yet.

    Raises:
        ValueError: Naming the argument.
    """
    if save_distributed_checkpoint:
        raise ValueError("save_distributed_checkpoint=True: checkpoints are single files; leave it False")
