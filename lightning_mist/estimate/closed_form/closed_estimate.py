"""The closed form at work: memory of a plan for a network that nobody traced, and a second opinion on one that was."""

from dataclasses import dataclass

import sympy

from lightning_mist.cost.chunks import stage_memory
from lightning_mist.cost.memory import StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import CUDA, OperatorSet, layer_form
from lightning_mist.estimate.closed_form.network_sizes import TransformerDims
from lightning_mist.estimate.closed_form.network_spec import ClosedForm, closed_form_spec
from lightning_mist.model.spec import MICROBATCH, SEQUENCE, ModelSpec
from lightning_mist.plan import Plan


def closed_form_estimate(form: ClosedForm, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, from a network's sizes alone.

    Args:
        form: The sizes, and what computes the network.

    Raises:
        PlanError: If the plan is not for so many layers, or its degrees do not divide the sizes.
    """
    if plan.num_layers != form.dims.layers:
        raise PlanError(
            f"the plan has {plan.num_layers} layers, the network {form.dims.layers}: a plan must cover every layer; "
            "plan again for this network"
        )
    degrees = {stage.mesh.tensor_parallel_degree for stage in plan.stages}
    try:
        spec = closed_form_spec(form, sorted(degrees))
    except ValueError as error:
        raise PlanError(str(error)) from error
    return stage_memory(spec, plan)


ALIKE = 5e-4
"""Share by which two counts of bytes may differ and still be shown as the same percentage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """What a trace and the closed form say of one layer.

    Attributes:
        rows: Microbatch rows.
        length: Sequence length.
        traced_bytes: Bytes that the layer keeps by the trace.
        operators: Name of the operators that it assumes.
        unit_bytes: Bytes of one hidden state, ``s b h`` elements.
    """

    rows: int
    length: int
    traced_bytes: int
    closed_bytes: int
    operators: str
    unit_bytes: int

    @property
    def ratio(self) -> float:
        """Traced over closed."""
        return self.traced_bytes / self.closed_bytes

    @property
    def text(self) -> str:
        """Both, in words; hidden states are what the published formulas count in."""
        traced, closed = (count / self.unit_bytes for count in (self.traced_bytes, self.closed_bytes))
        if abs(self.ratio - 1) < ALIKE:
            return f"each layer keeps {traced:.2f} hidden states, as the closed form for {self.operators} says"
        return (
            f"each layer keeps {traced:.2f} hidden states; the closed form for {self.operators} says {closed:.2f}, the "
            f"trace {abs(self.ratio - 1):.1%} {'more' if self.ratio > 1 else 'less'}: the module computes by other "
            "operators than it assumes"
        )


def cross_check(spec: ModelSpec, dims: TransformerDims, operators: OperatorSet = CUDA) -> CrossCheck:
    """Compare what a traced layer keeps with the closed form.

    Args:
        spec: What was traced, in one of Lightning's precisions.

    Raises:
        ValueError: If the network has no sequence or other sizes.
    """
    if spec.sequence_length is None or not spec.layers:
        raise ValueError(
            f"{spec.name} has {'no repeated layers' if not spec.layers else 'no sequence dimension'}: the closed form "
            "is about layers over sequences"
        )
    if spec.num_layers != dims.layers:
        raise ValueError(f"{spec.name} has {spec.num_layers} layers, its sizes say {dims.layers}: they must be equal")
    kind, _, how = spec.precision.partition("-")
    itemsize = {"16": 2, "bf16": 2, "64": 8}.get(kind, 4)
    form = layer_form(dims, operators, itemsize=itemsize, mixed=how == "mixed")
    rows, length = spec.batch_rows, spec.sequence_length
    layer = spec.layers[spec.kinds[0]]
    return CrossCheck(
        rows=rows,
        length=length,
        traced_bytes=int(sympy.sympify(layer.saved_bytes).subs({MICROBATCH: rows, SEQUENCE: length})),
        closed_bytes=form.at(rows, length),
        operators=operators.name,
        unit_bytes=rows * length * dims.hidden * itemsize,
    )
