"""Notices parameters that a step uses between its layers while their values are on another device.

Under ZeRO-3 a rank has the parameters of a layer while the layer runs. A step that begins to use one elsewhere (a
penalty on weights that starts later, a weight that is logged) would see something that is not a number.

Before the first layer of a later stage the step does again what the stages before have done, for its form alone: what
it makes of such a parameter there is a fake, as what it makes of parameters of other stages is.

Nor may a step run a backward of its own while parameters behind it are freed, nor write into weights what other ranks
do not.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_mist.attributes import SharedPatch, replaced
from lightning_mist.devices import read
from lightning_mist.errors import PlanError, TraceError
from lightning_mist.plan import ModuleMap, ZeroStage, parts_of
from lightning_mist.plan.calls import leaves_of, user_line
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.tensors import is_hollow

_READS = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)
"""Functions that use values and give no tensor."""

_FORMS = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like", "requires_grad_"))
"""Functions that give a tensor and use no values."""


_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


class ParameterGuard(TorchFunctionMode):
    """Watches a step between its layers, and not inside them, where every operator would take longer."""

    _fake_mode: FakeTensorMode | None = None
    _is_on = False

    def __init__(self, away: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in away.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        gives = name in _READS or any(isinstance(leaf, Tensor) for leaf in leaves_of(output))
        if gives and name not in _FORMS and func is not _GRADIENT:
            for leaf in leaves_of((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter) and id(leaf) in self._names and is_hollow(leaf):
                    return self._hidden(leaf, output, leaves_of((args, kwargs or {})))
        return output

    def _hidden(self, parameter: nn.Parameter, output: Any, given: Iterable[Any]) -> Any:
        """What a function made of a parameter's missing values, as a fake."""
        fake_mode, known = self._fake_mode, {id(leaf) for leaf in given}
        if fake_mode is None or any(not isinstance(leaf, Tensor) or id(leaf) in known for leaf in leaves_of(output)):
            self._refuse(parameter)

        def hide(tensor: Tensor) -> Tensor:
            assert fake_mode is not None
            return tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor.detach())

        return tree_map_only(Tensor, hide, output)

    def _refuse(self, parameter: nn.Parameter) -> NoReturn:
        raise TraceError(
            f"the step uses parameter {self._names[id(parameter)]} at {user_line()} while it is on another device: "
            "under zero_stage 3 it is here for the layers that used it when the plan was made. Use zero_stage = 2, or "
            "let the step use it there from its first batch on"
        )

    @contextmanager
    def watched(self, fake_mode: FakeTensorMode | None = None) -> Iterator[None]:
        """Inside, the step is watched wherever it is between its layers."""
        self.enter(fake_mode)
        try:
            yield
        finally:
            self.leave()

    def enter(self, fake_mode: FakeTensorMode | None = None) -> None:
        """The step is between layers from here on; with ``fake_mode`` before the first of the stage."""
        if self._names and not self._is_on:
            self._fake_mode, self._is_on = fake_mode, True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The step is in a layer from here on. Modes of the user's own around it keep the watch on."""
        if self._is_on and torch.overrides._get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._is_on = False
            self.__exit__(None, None, None)


class WrittenWeights:
    """Notices what is written into weights besides the optimizer's update.

    Where one rank updates a weight for others it must be the same on all; where ranks lack weights, or run a step more
    than once a batch, it would be lost or done twice. Where there is a sign of such code, ``compares`` is true: ranks
    compare what they have before each update.
    """

    def __init__(self, mesh: Mesh, parameters: Mapping[str, nn.Parameter], module_map: ModuleMap) -> None:
        plan, stage = mesh.plan, mesh.plan.stages[mesh.stage]
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        is_given_out = mesh.is_sharded and stage.zero_stage < ZeroStage.PARAMETERS and len(mesh.shard_peers) > 1
        has_sign = bool(module_map.writes or module_map.excludes("sharded_parameters"))
        self.compares = is_given_out and has_sign and bool(trained)
        is_whole = plan.num_stages == plan.num_microbatches == max(parts_of(plan)) == stage.mesh.num_row_peers == 1
        # What nobody updates is each rank's own where it has all of it and runs its own batches.
        watched = trained if is_given_out and is_whole else parameters
        self._watched = {} if module_map.writes == "seen" else watched
        self._trained, self._group, self._before = trained, tuple(sorted(mesh.shard_peers)), list[int]()
        self._is_given_out, self._places = is_given_out, list[int]()

    def begin(self) -> None:
        """A batch begins; raises PlanError if weights that other ranks update share memory."""
        self._before = [parameter._version for parameter in self._watched.values()]
        if self._is_given_out:
            self._check_memory()

    def _check_memory(self) -> None:
        before, self._places = self._places, [parameter.data_ptr() for parameter in self._trained.values()]
        if before == self._places:
            return
        here = [(name, p) for name, p in self._trained.items() if p.numel() and all(p.stride()) and not is_hollow(p)]
        # What has gaps may have others' elements in them.
        spans = sorted((p.data_ptr(), p.nbytes, name) for name, p in here if _reach(p) == p.numel())
        for (start, size, name), (then, _, other) in pairwise(spans):
            if then < start + size:
                raise PlanError(
                    f"{name} and {other} have come to lie in the same memory: ranks update them apart, and of two "
                    "updates one would be lost. Share one parameter before fit, or use zero_stage = 0"
                )

    def check(self) -> None:
        """Raise PlanError if the step has written into a parameter since, which it did not when it was traced."""
        for (name, parameter), version in zip(self._watched.items(), self._before, strict=True):
            if parameter._version != version:
                raise PlanError(f"the step wrote into {name}, which it did not when the plan was made; {_WRITTEN}")

    def compare(self, transport: Transport) -> None:
        """Raise PlanError, on all ranks, if those that one updates a parameter for have other values of it."""
        sums = torch.stack([sum_of_bits(parameter) for parameter in self._trained.values()])
        found = transport.all_gather(sums, self._group)
        found.wait()
        rows = found.result().view(len(self._group), -1)
        for name, is_other in zip(self._trained, read((rows != rows[0]).any(0)), strict=True):
            if is_other:
                raise PlanError(f"code beside the optimizer wrote other values into {name} on each rank; {_WRITTEN}")


_WRITTEN = (
    "under data parallelism each rank goes on with its own, where this plan would give one rank's to all, or lose it: "
    "use zero_stage = 0 in a plan with one stage and whole batches"
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """A number that differs between tensors which differ, but by rare chance; in any order of adding up the same."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


_HERE = threading.local()


@contextmanager
def refused_backward() -> Iterator[None]:
    """Inside, this thread may not run a backward; see :class:`~lightning_mist.errors.TraceError`."""
    _HERE.is_in_step = True
    try:
        with _guarded_backward():
            yield
    finally:
        _HERE.is_in_step = False


@contextmanager
def seen_backward(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, backwards are told before they run; ``torch.autograd`` has no hook for them."""
    module: Any = torch.autograd
    original = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        tell()
        return original(*args, **kwargs)

    with replaced(module, _engine_run_backward=run):
        yield


def _refuse_in_step() -> None:
    # A compiler that traces a part of the step differentiates what it has traced, on tensors without values.
    is_compiling = TracingContext.try_get() is not None
    if getattr(_HERE, "is_in_step", False) and not is_compiling:
        raise TraceError(
            "the step runs a backward of its own (torch.autograd.grad or Tensor.backward): under zero_stage 3, and "
            "where parameters are offloaded, those of the layers behind it are freed by then; use zero_stage=2 and "
            "offload.parameters=0"
        )


_guarded_backward = SharedPatch(lambda: seen_backward(_refuse_in_step))


# Notices when user code talks to other processes, or asks which one it runs in.
#
# Ranks that share a batch, or cut it, run a step at other times and more or less often than each other: what the step
# says to other processes would be answered by the wrong ones, or never. ``torch.distributed`` has no hook for this. All
# its collectives, and its ``get_rank``, ask one function of its module whether this process is in the group; that one
# is replaced while somebody watches.


Talk = Literal["collective", "rank"]
"""A message to other processes, or the question which one this is."""

Notice = Callable[[Talk, str], bool]
"""Is told what user code does and where; a collective does nothing if it answers True. It may raise instead."""

_OURS = "lightning_mist"
_BETWEEN = frozenset(("torch", "contextlib", "functools"))
_SPEAKING = tuple(f"lightning_mist.{name}" for name in ("strategy", "hardware", "cli", "runtime.communication"))
"""Where this package talks to other processes itself; elsewhere it only passes on what user code does."""

_LIBRARIES = frozenset(("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"))

_ASKING = ("get_", "_get_", "is_", "_is_", "_check_", "destroy_", "_abort_")
"""How names begin of functions that ask the same function and say nothing to others."""


@contextmanager
def watched_processes(notice: Notice) -> Iterator[None]:
    """Inside, user code that talks to other processes is noticed, on any thread; what this package says is not."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    module: Any = dist.distributed_c10d
    original = module._rank_not_in_group

    def is_outside(group: Any) -> bool:
        function = sys._getframe(1).f_code.co_name
        caller = _caller()
        # torch itself asks for the rank in every collective, to log it.
        asks = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
        if function == "get_rank" and asks not in ("torch", _OURS, *_LIBRARIES):
            notice("rank", f"get_rank at {_line()}")
        if function.startswith(_ASKING) or caller == _OURS:
            return bool(original(group))
        return notice("collective", f"{function} at {_line()}") or bool(original(group))

    with replaced(module, _rank_not_in_group=is_outside, _warn_not_in_group=lambda name: None):
        yield


def _caller() -> str:
    """The package of the innermost frame that is neither torch's nor passes on what others do."""
    frame = sys._getframe(2)
    while True:
        name = str(frame.f_globals.get("__name__"))
        top = name.partition(".")[0]
        is_between = top in _BETWEEN or (top == _OURS and not name.startswith(_SPEAKING))
        if not is_between or frame.f_back is None:
            return top
        frame = frame.f_back


def _line() -> str:
    return user_line(("torch", "contextlib", "functools", _OURS, *_LIBRARIES))


def _reach(tensor: Tensor) -> int:
    """Elements from a tensor's first in memory up to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
