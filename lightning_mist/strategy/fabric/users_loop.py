"""A loop that the user writes, as planning and training see it: its code, its calls, and what they return."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist.attributes import MACHINERY, is_a
from lightning_mist.errors import TraceError
from lightning_mist.model.user_code import Code, is_installed
from lightning_mist.plan import Exclusion
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.strategy.user_code import GRADIENTS_AWAY, gradients_read_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of a module, as a batch that can be cut and sent.

    Attributes:
        positional: Arguments by position, as a mapping: a list of as many entries as rows could be taken for rows.
    """

    positional: dict[str, Any]
    named: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Call":
        """Of arguments."""
        return cls(positional={str(index): item for index, item in enumerate(args)}, named=dict(kwargs))

    def to(self, function: Callable[..., Any]) -> Any:
        """Call a function."""
        return function(*self.positional.values(), **self.named)


def loop_exclusions(frame: FrameType | None = None) -> tuple[Exclusion, ...]:
    """What the code that is running, up from a frame, and what it calls by name, rules out."""
    frame, codes = frame or sys._getframe(1), list[Code]()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in MACHINERY and not is_installed(frame.f_code):
            codes.append(Code(frame.f_code, frame.f_globals, tuple(frame.f_locals.values())))
        frame = frame.f_back
    if (found := gradients_read_in(codes)) is None:
        return ()
    name, place = found
    reason = f"the loop may look at gradients ({name} in {place}), which would not all be on every rank"
    return exclusions_of([(reason, GRADIENTS_AWAY)])


# What a module returns --------------------------------------------------------------------------------------------
# The loop is the user's, who may do with outputs whatever they like. They leave as results of one node of the graph, in
# whose backward it is seen what gradients arrive for which of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How a module's output is built.

    Attributes:
        differentiable: For each leaf whether gradients can come back through it.
        carried: For each leaf whether it is a value that can go to another rank.
        loss: Which leaf is the loss; None if there is none, or it cannot be told which.
    """

    spec: TreeSpec
    differentiable: tuple[bool, ...]
    carried: tuple[bool, ...]
    loss: int | None

    def check(self, output: Any) -> list[Any]:
        """The leaves of an output of this form.

        Raises:
            TraceError: If it has another form.
        """
        leaves, spec = tree_flatten(output)
        if spec != self.spec:
            raise TraceError(
                f"the module returned {spec} and had returned {self.spec} when the plan was made: in training it must "
                "return the same on every call; run it under torch.no_grad() where it is not trained"
            )
        return leaves


def form_of(output: Any) -> OutputForm:
    """The form of an output; its loss is the only scalar that gradients can come through, or is called so."""
    leaves, spec = tree_flatten(output)
    differentiable = tuple(is_a(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    scalars = [index for index, leaf in enumerate(leaves) if differentiable[index] and leaf.ndim == 0]
    if is_a(output, Mapping) and is_a(output.get("loss"), Tensor):
        scalars = [index for index in scalars if leaves[index] is output["loss"]]
    carried = tuple(leaf is None or is_a(leaf, (Tensor, bool, int, float, str)) for leaf in leaves)
    loss = scalars[0] if len(scalars) == 1 else None
    return OutputForm(spec=spec, differentiable=differentiable, carried=carried, loss=loss)


def as_step_result(form: OutputForm, output: Any) -> dict[str, Any]:
    """What a module with a loss returned, as a step returns it."""
    leaves = form.check(output)
    assert form.loss is not None
    rest = {str(index): leaf for index, leaf in enumerate(leaves) if index != form.loss and form.carried[index]}
    return {"loss": leaves[form.loss], **rest}


def from_step_result(form: OutputForm, loss: Tensor | None, extras: Mapping[str, Any]) -> list[Any]:
    """The leaves that :func:`as_step_result` took apart; what no other rank can be given is a :class:`Withheld`."""
    return [
        loss if index == form.loss else extras[str(index)] if is_carried else Withheld()
        for index, is_carried in enumerate(form.carried)
    ]


class Withheld:
    """Stands for an object that a module returned where its parts ran: a cache of keys and values, for example."""

    def __getattr__(self, name: str) -> Any:
        """Refuse.

        Raises:
            TraceError: Always.
        """
        raise TraceError(
            f"{name} of an object that the module returned beside its loss: a plan's schedule returns tensors, numbers "
            "and text only. Let the module return what is needed as tensors, or pass returns_loss=False"
        )

    def __len__(self) -> int:
        """Refuse, as for every other use."""
        return int(self.__getattr__("the length"))

    def __iter__(self) -> Iterator[Any]:
        """Refuse, as for every other use."""
        return iter(self.__getattr__("the items"))

    def __getitem__(self, index: Any) -> Any:
        """Refuse, as for every other use."""
        return self.__getattr__("an item")


def stand_in_loss(output: Any) -> Tensor | None:
    """A loss that depends on all of an output, for planning where the loop computes the real one; None if none can."""
    parts = [leaf.sum() for leaf in tree_flatten(output)[0] if is_a(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([part.float() for part in parts]).sum() if parts else None


@dataclass(slots=True, kw_only=True, eq=False)
class Arrival:
    """What one forward is to hear of its backward.

    Attributes:
        refusal: Why there can be no backward, if so.
        finish: What to do behind the backward.
        steps: How often the optimizer had stepped before it.
        averages: Whether its gradients are to be averaged over ranks now.
        gradients: For each output that gradients can come through, what has come; None before any has.
    """

    refusal: str = ""
    finish: "Callable[[Arrival], None]" = lambda arrival: None
    tell: "Callable[[Arrival], None]" = lambda arrival: None
    number: int = 0
    steps: int = 0
    averages: bool = True
    gradients: list[Tensor | None] | None = None

    def arrived(self, gradients: Sequence[Tensor | None]) -> None:
        """Gradients come.

        Raises:
            TraceError: If there can be no backward.
        """
        if self.refusal:
            raise TraceError(self.refusal)
        if self.gradients is not None:
            raise TraceError(
                "backward ran twice through one forward of the module, which has its gradients only once; add up "
                "losses and call fabric.backward once, or run the module again"
            )
        self.gradients = list(gradients)
        self.tell(self)


class _Outputs(torch.autograd.Function):
    """Outputs whose gradients are told to an :class:`Arrival`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.arrival.arrived(gradients)
        return (None,) * (2 + len(gradients))


def connected(output: Any, arrival: Arrival, differentiable: Sequence[bool] | None = None) -> Any:
    """An output that tells an :class:`Arrival` of gradients of some leaves, by default of all that require them."""
    leaves, spec = tree_flatten(output)
    flags = differentiable or [is_a(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    chosen = [index for index, is_one in enumerate(flags) if is_one]
    if not chosen:
        return output
    anchor = torch.zeros((), requires_grad=True, device=leaves[chosen[0]].device)
    values = _Outputs.apply(anchor, arrival, *(leaves[index].detach() for index in chosen))  # type: ignore[no-untyped-call]
    made = dict(zip(chosen, values, strict=True))
    return tree_unflatten([made.get(index, leaf) for index, leaf in enumerate(leaves)], spec)


class OutsideLoss(torch.autograd.Function):
    """A scalar whose backward gives outputs the gradients that came from the user's loop, whatever its own is."""

    @staticmethod
    def forward(ctx: Any, arrival: Arrival, *outputs: Tensor) -> Tensor:
        """Give a number that nobody looks at."""
        ctx.arrival = arrival
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Give outputs what has come."""
        found, ctx.arrival.gradients = ctx.arrival.gradients, []
        return (None, *found)


Run = Callable[["PlannedModule", tuple[Any, ...], dict[str, Any]], Any]


class PlannedModule(nn.Module):
    """What ``fabric.setup`` gives back in place of the user's module: the strategy decides how its calls run.

    Attributes:
        module: The user's module, as under ``DistributedDataParallel``.
        parallel: The module wrapped in that, where the plan is plain data parallelism.
    """

    parallel: nn.Module | None

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        # No children: what they hold is held once.
        vars(self)["parallel"], vars(self)["_run"] = None, run

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def redirects(self) -> bool:
        """Whether this call is of another method of the module than ``forward``, as Fabric lets them pass."""
        return getattr(vars(self.module).get("forward"), "__name__", "") == "wrapped_forward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return torch.compiler.disable(vars(self)["_run"])(self, args, kwargs)  # type: ignore[no-untyped-call]
