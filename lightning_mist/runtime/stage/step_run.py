"""One run of the user's step on a stage: what it takes and gives, where it is, and which values cross a cut."""

import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import occurrence, results, select
from lightning_mist.runtime.shared_patch import SharedPatch
from lightning_mist.without_values import INDEXING, is_known_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A tensor that a stage will receive.

    Attributes:
        length: Size of the whole tensor along the dimension of the sequence; 1 if it has none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage's forward gave.

    Attributes:
        tensors: The tensors to send, in the order of the map's cut, attached to the graph; empty on the last stage.
        lengths: For each of them the size of the whole tensor along the dimension of the sequence; 1 if it has none.
        value: What the user's step returned, on the last stage.
    """

    tensors: tuple[Tensor, ...]
    value: Any
    lengths: tuple[int, ...] = ()


class StepExit(BaseException):
    """Leaves the user's step; passes ``except Exception``."""


class StepRun:
    """One run of the step.

    Args:
        received: The tensors received for the first cut; None for a run that only asks what they will be.

    Attributes:
        is_quiet: Whether nothing that is wanted can be made now.
        behind: Contexts of what follows the last block.
        error: What went wrong, to be raised once the step is left.
    """

    def __init__(
        self, wanted: frozenset[Hashable], received: Sequence[Tensor] | None, random_state: Tensor | None
    ) -> None:
        self.wanted, self.received, self.random_state = wanted, received, random_state
        self.counts: dict[Hashable, int] = {}
        self.objects: dict[Hashable, Tensor] = {}
        self.region = -1
        self.inside: int | None = None
        self.has_grad = torch.is_grad_enabled()
        self.is_quiet = False
        self.error: TraceError | None = None
        self.behind = ExitStack()

    def fail(self, message: str) -> StepExit:
        """An exception that user code does not swallow; the error is raised once the step is left."""
        self.error = TraceError(message)
        return StepExit()


class BlockObserver(Protocol):
    """Is told when a stage's forward enters and leaves its blocks; recomputation in backward is not told."""

    def before_block(self, position: int) -> None:
        """The step is about to run a block of the stage."""

    def after_block(self, position: int) -> None:
        """The step has run a block of the stage."""


class Watcher(TorchFunctionMode):
    """Finds wanted values among the results of torch functions, and indexes fakes by known masks."""

    def __init__(self, run: StepRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, kwargs = self._run, kwargs or {}
        if run.is_quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if name in INDEXING and isinstance(args[0], FakeTensor):
            func, args = select(name, func, args, is_known_mask)
        output = func(*args, **kwargs)
        made = [leaf for leaf in results(name, args, output) if isinstance(leaf, Tensor)]
        if made:
            base = occurrence(run.counts, "glue" if run.inside is None else "inner", run.region, name)
            for leaf, tensor in enumerate(made):
                key = (*base, leaf)
                if key in run.wanted:
                    run.objects[key] = tensor
        return output


@SharedPatch
@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch does not warn about the gradients of tensors that meet a fake.

    It looks at ``.grad`` of a real tensor when making its fake, and hides its own warning only where warnings are shown
    and not where they are errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        yield


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def enter_graph(tensor: Tensor) -> Tensor:
    """A received leaf as an inner node of the graph, sharing its memory.

    A step may write in place into what crosses a cut, as it may in the uncut module, but not into a leaf or its view.
    """
    tensor.requires_grad_(True)
    with torch.enable_grad():
        return _Enter.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]
