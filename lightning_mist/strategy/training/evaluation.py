"""Evaluation inside ``fit`` runs on the whole module on every rank, with the buffers that DDP would give it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.runtime.communication import complete
from lightning_mist.strategy.training.engine import Engine
from lightning_mist.strategy.training.failure_handling import EndsTogether
from lightning_mist.units import format_bytes


class WholeEvaluation(EndsTogether):
    """The part of the strategy that runs evaluation inside ``fit`` on the whole module, as under DDP."""

    _engine: Engine | None

    def on_train_start(self) -> None:
        """From here on each rank has its part; until here, and while a fit is prepared, it has the whole module."""
        super().on_train_start()
        if self._engine is not None and not self._engine.has_begun:
            self._engine.begin(None)

    def on_validation_start(self) -> None:
        """Evaluation inside ``fit`` runs on the whole module, as under DDP."""
        super().on_validation_start()
        if self._engine is not None:
            with self.all_take_part():
                self._engine.fill()

    def on_validation_end(self) -> None:
        """Training goes on with this rank's part."""
        super().on_validation_end()
        if self._engine is not None and self._engine.has_begun:
            self._engine.hollow()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A forward of DDP's, which may give every rank the buffers of rank 0 first."""
        if self._engine is None:
            return super().validation_step(*args, **kwargs)
        complete(self._engine.buffers.before_forward())
        output = super().validation_step(*args, **kwargs)
        self._engine.buffers.after_forward()
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around batches whose gradients are only accumulated: the forward after them finds buffers as they are."""
        if self._engine is None:
            with super().block_backward_sync():
                yield
        else:
            with self._engine.buffers.accumulating():
                yield


@contextmanager
def as_wrapped(module: nn.Module) -> Iterator[None]:
    """Inside, a module is its own ``module``, so that ``trainer.model.module`` is the user's as where DDP wraps it."""
    if hasattr(module, "module"):
        yield
        return
    vars(module)["module"] = module
    try:
        yield
    finally:
        vars(module).pop("module", None)


def broadcasts_buffers(options: Mapping[str, Any]) -> bool:
    """Whether DDP with these options gives every rank the buffers of rank 0 before forwards."""
    now = options.get("forward_sync_buffers")
    return bool(options.get("broadcast_buffers", True) if now is None else now)


def whole_module_bytes(plan: Plan, module: nn.Module) -> tuple[int, ...]:
    """For each stage, what its devices hold while the whole module is there for evaluation, activations left out.

    That is all parameters and buffers, and the gradients and optimizer state of the stage's own parameters. Empty if
    the plan has no prediction.
    """
    if plan.predicted is None:
        return ()
    tensors = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    terms = [dict(stage.breakdown) for stage in plan.predicted.stages]
    return tuple(
        whole + round(term.get("optimizer_bytes", 0.0)) + round(term.get("parameter_bytes", 0.0)) for term in terms
    )


def check_evaluation(plan: Plan, module: nn.Module, limits: Sequence[int]) -> None:
    """Refuse a pipeline whose training fits, but not the evaluation that interrupts it.

    Args:
        plan: The plan.
        module: The module with all its parameters.
        limits: Bytes of each device of every stage.

    Raises:
        InfeasibleError: Naming the stage that lacks most.
    """
    first = plan.stages[0]
    is_whole = first.mesh.tensor_parallel_degree == 1 and first.zero_stage < ZeroStage.PARAMETERS
    if plan.num_stages == 1 and is_whole:
        return  # every rank has the whole module anyway
    needs = whole_module_bytes(plan, module)
    lacks = [need - limit for need, limit in zip(needs, limits, strict=True)] if needs else [0]
    if max(lacks) > 0:
        stage = lacks.index(max(lacks))
        raise InfeasibleError(
            "validation during fit makes the module whole on every device, which takes "
            f"{format_bytes(needs[stage])} on stage {stage} of {plan.num_stages}, activations not counted; "
            f"memory_limit is {format_bytes(limits[stage])} per device. Set limit_val_batches=0 and validate in a run "
            "of its own, or raise memory_limit"
        )
