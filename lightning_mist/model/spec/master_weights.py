"""What master weights make of a network's costs."""

from dataclasses import replace

from lightning_mist.model.spec.model_spec import ModelSpec
from lightning_mist.model.spec.optimizer_spec import OptimizerSpec

RATIO = 2
"""Bytes of a master, and of what is added up of its gradient, per byte of the parameter: 32 bits for 16."""

MASTERS_PRECISION = "bf16-true"
"""Lightning's name of the precision that can have master weights: gradients in float16 would have to be scaled."""


def with_master_weights(spec: ModelSpec, optimizer: OptimizerSpec | None = None) -> ModelSpec:
    """The same network with masters in 32 bits.

    Masters are counted with the optimizer's state: they are held, sharded and updated with it.

    Args:
        optimizer: What the optimizer needs per byte of parameters in 32 bits; by default what the network says.

    Raises:
        ValueError: If its precision has no master weights.
    """
    if spec.precision != MASTERS_PRECISION:
        raise ValueError(f"master weights in {spec.precision}: they are for {MASTERS_PRECISION}; ask for that")
    of = optimizer or spec.optimizer
    made = replace(
        of,
        state_bytes_per_parameter_byte=RATIO * (1 + of.state_bytes_per_parameter_byte),
        step_peak_bytes_per_parameter_byte=RATIO * of.step_peak_bytes_per_parameter_byte,
        step_peak_bytes_per_largest=RATIO * of.step_peak_bytes_per_largest,
        # A master is read, and its cast written.
        step_moved_bytes_per_parameter_byte=RATIO * of.step_moved_bytes_per_parameter_byte + RATIO + 1,
        step_left_bytes_per_parameter_byte=RATIO * of.step_left_bytes_per_parameter_byte,
        step_seconds_per_parameter_byte=RATIO * of.step_seconds_per_parameter_byte,
        gradient_bytes_per_parameter_byte=RATIO,
    )
    return replace(spec, optimizer=made, master_weights=True)
