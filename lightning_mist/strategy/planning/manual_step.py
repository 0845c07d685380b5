"""Steps that call backward and step their optimizers themselves: how they are tried, and what they rule out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_mist.attributes import replaced
from lightning_mist.errors import TraceError
from lightning_mist.plan import Exclusion, Feature
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.strategy.planning.plain_parallelism import MANUAL
from lightning_mist.strategy.training import NOT_AVERAGED
from lightning_mist.strategy.user_code import GRADIENTS_AWAY, STATE_AWAY, read_in_step

BUT_MANUAL: tuple[Feature, ...] = (
    "pipeline",
    "microbatches",
    "tensor",
    "sequence",
    "context",
    "sharded_parameters",
    "offloaded_parameters",
    "offloaded_gradients",
    "offloaded_activations",
)
"""What needs to know a step's forward and its one backward apart."""


def rehearse(trainer: Any, strategy: Any, call: Callable[[Any], Any], batch: Any) -> Any:
    """Run a manual step on a batch without its backwards and updates; gives the sum of the losses that it has.

    Raises:
        TraceError: If it asks for gradients that are not averaged.
    """
    losses: list[Tensor] = []

    def backward(loss: Tensor, *_: Any, **__: Any) -> Tensor:
        losses.append(loss if loss.ndim == 0 else loss.sum())
        return loss

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        return closure()

    def block_backward_sync() -> Any:
        raise TraceError(NOT_AVERAGED)

    instead = {"backward": backward, "optimizer_step": optimizer_step, "block_backward_sync": block_backward_sync}
    # Torch's clipping by value expects that there is a gradient; by norm it does not.
    grouped = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    grouping = replaced(clip_grad, _group_tensors_by_device_and_dtype=lambda kinds: grouped(kinds) if kinds[0] else {})
    with _unchanged(trainer), grouping:
        vars(strategy).update(instead)
        try:
            output = call(batch)
        finally:
            for name in instead:
                del vars(strategy)[name]
    return sum(losses[1:], losses[0]) if losses else output


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Inside, optimizers have no parameters; what a step changes of them and of schedulers is undone."""
    optimizers = trainer.strategy.optimizers
    schedulers = [item.scheduler for item in trainer.strategy.lr_scheduler_configs]
    groups = [(group, dict(group)) for item in optimizers for group in item.param_groups]
    states = [(item, deepcopy(item.state_dict())) for item in schedulers]
    called = [(item, getattr(item, "_opt_called", False)) for item in optimizers]
    for group, _ in groups:
        # Whoever clears or switches off gradients would else be seen to use parameters from outside of their modules.
        group["params"] = []
    for item in optimizers:
        item._opt_called = True  # or schedulers warn that they are stepped first
    try:
        yield
    finally:
        for item, was_called in called:
            item._opt_called = was_called
        for item, state in states:
            item.load_state_dict(state)
        for group, before in groups:
            group.update(before)


def manual_exclusions(module: Any) -> tuple[Exclusion, ...]:
    """What a manual step rules out: what needs its forward and backward apart, and what its code looks at."""
    reasons = [(MANUAL, BUT_MANUAL)]
    found = read_in_step(module)
    if found is not None:
        whole, name, place = found
        reason = f"training_step may look at {whole} ({name} in {place}), which would not all be on every rank"
        reasons.append((reason, GRADIENTS_AWAY if whole == "gradients" else STATE_AWAY))
    return exclusions_of(reasons)
