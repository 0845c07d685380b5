"""What an optimizer needs, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What the optimizer keeps and needs.

    Attributes:
        state_bytes_per_parameter_byte: Bytes of state kept per byte of a trained parameter (AdamW in fp32: 2).
        step_peak_bytes_per_parameter_byte: Temporary bytes of its step per byte of all parameters it updates at once
            (the foreach implementations).
        step_peak_bytes_per_largest: Temporary bytes of its step per byte of the largest parameter (loop
            implementations), when those of a parameter as large are left.
        step_left_bytes_per_parameter_byte: Of the temporaries of a loop those that are left until the next parameter's
            have been made, per byte of the parameter that left them.
        step_seconds_per_parameter_byte: Seconds of one step per byte of parameters, measured; 0 if it was not.
        gradient_bytes_per_parameter_byte: Bytes of a gradient, as gradients are added up, per byte of its parameter:
            2 for gradients in 32 bits of parameters in 16 (master weights).
        narrow_state: Type of 8 bits in which it keeps state; empty if it keeps none.
    """

    name: str
    state_bytes_per_parameter_byte: float
    step_peak_bytes_per_parameter_byte: float
    step_peak_bytes_per_largest: float
    step_moved_bytes_per_parameter_byte: float
    step_left_bytes_per_parameter_byte: float = 0.0
    step_seconds_per_parameter_byte: float = 0.0
    gradient_bytes_per_parameter_byte: float = 1.0
    narrow_state: str = ""
