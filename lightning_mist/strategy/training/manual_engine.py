"""An engine for steps that call backward, and step their optimizers, themselves: one stage, whole batches.

The user's step runs as it is, its blocks recomputed in backward where the plan says so. Behind each of its backwards
the gradients that it made are averaged, to their owners where optimizer state is sharded, and added to those that were
there before; behind each step of an optimizer every rank gets what was updated. All ranks do both at once. Inside the
user's step the groups of optimizers are those of the user, around their updates what this rank owns of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.errors import TraceError
from lightning_mist.runtime.communication import complete
from lightning_mist.runtime.parameters import at_work
from lightning_mist.strategy.training.engine import Engine
from lightning_mist.strategy.training.whole_model import OwnedOptimizer
from lightning_mist.tensors import gradients_aside

NOT_AVERAGED = (
    "backward where gradients are not to be averaged over ranks (sync_grad=False, block_backward_sync): this plan "
    "averages behind each backward; leave it out, gradients add up all the same, or train by plain data parallelism"
)

_END, _BACKWARD = "end training_step", "run manual_backward"
_STEP, _CLIP = "step optimizer", "clip gradients of optimizer"


class ManualEngine(Engine):
    """This rank's part of a running plan of one stage for a module with ``automatic_optimization=False``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owns = frozenset(self.stages.parameters[item.name] for item in self.executor.mesh.owned)
        self._is_within = False
        trained = [parameter for parameter in self.stages.parameters.values() if parameter.requires_grad]
        self._watched = [p.register_post_accumulate_grad_hook(self._accumulated) for p in trained]  # type: ignore[no-untyped-call]

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run the user's step on a batch of this rank's own.

        Raises:
            TraceError: If ranks run backwards or step optimizers in different orders.
        """
        complete(self.buffers.before_forward())
        (stage,) = self.stages
        watched = nullcontext() if self.guard is None else self.guard.batch()
        with watched, self.stages.attached(), self._whole_groups():
            output = stage.forward(step, ()).value
        # DDP takes such a step for one that averages nothing, behind which each rank keeps its own buffers.
        with self.buffers.accumulating():
            self.buffers.after_forward()
        self._all_do(_END)
        return output

    # Backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Around a backward of the user's: what it adds to gradients is averaged over all ranks."""
        if not self.buffers.averages:
            raise TraceError(NOT_AVERAGED)
        self._all_do(_BACKWARD)
        parameters, reducer = list(self.stages.parameters.values()), self.executor.reducer
        watched = nullcontext() if self.guard is None else self.guard.backward()
        with replaced(self, _is_within=True), gradients_aside(parameters) as gradients:
            with reducer.around_backward(), watched:
                yield
            complete(reducer.reduce())
            for index, (parameter, before) in enumerate(zip(parameters, gradients, strict=True)):
                if parameter.grad is not None:
                    gradients[index] = parameter.grad if before is None else before.add_(parameter.grad)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if not self._is_within:
            raise TraceError(
                f"{self.canonical_name(parameter)} got a gradient outside of self.manual_backward, which is not "
                "averaged over ranks: call self.manual_backward(loss) in place of loss.backward()"
            )

    # Optimizers --------------------------------------------------------------------------------------------------

    def update(self, optimizer: Any, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """Step, with a closure, what this rank owns of an optimizer, and give every rank what was updated."""
        owned = self.owned(optimizer)
        owned.check()
        self._all_do(_STEP, owned)

        def called() -> Any:
            with self._whole_groups():
                return closure()

        with owned.cut.showing(self._owns.__contains__):
            output = step(called)
            with at_work():
                owned.flush()
        with at_work():
            complete(self.executor.gather_parameters())
        return output

    @contextmanager
    def _whole_groups(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owned in self._optimizers:
                stack.enter_context(owned.cut.showing(lambda _: True))
            yield

    def release_optimizers(self, timeout: timedelta | None) -> list[Callable[[], dict[str, Any]]]:
        """As for every engine; nobody is told of gradients any longer."""
        for hook in self._watched:
            hook.remove()
        return super().release_optimizers(timeout)

    def clip_by_norm(self, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As for every engine; all ranks do it at once."""
        self._all_do(_CLIP, self.owned(optimizer))
        return super().clip_by_norm(optimizer, *args, **kwargs)

    def _all_do(self, what: str, owned: OwnedOptimizer | None = None) -> None:
        """Refuse to go on where other ranks do something else: what they exchange next would be taken for another."""
        if self.plan.world_size == 1:
            return
        numbers = range(len(self._optimizers))
        of_optimizers = [f"{word} {number}" for word in (_STEP, _CLIP) for number in numbers]
        words = (_END, _BACKWARD, *of_optimizers)
        own = words.index(what if owned is None else f"{what} {self._optimizers.index(owned)}")
        found = self.transport.all_gather(torch.tensor([own], device=self.device), tuple(range(self.plan.world_size)))
        found.wait()
        other = next((number for number in found.result().flatten().tolist() if number != own), None)
        if other is not None:
            raise TraceError(
                f"rank {self.rank} is to {what} where another is to {words[other]}: under this plan all ranks take "
                "part in every backward and step of training_step; decide by what is the same on every rank, such as "
                "batch_idx, or train by plain data parallelism"
            )
