"""Evaluation inside ``fit`` runs on the whole module on every rank: does that fit?"""

from collections.abc import Sequence

from torch import nn

from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.units import format_bytes


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
