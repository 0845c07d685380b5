"""What is kept in host memory and comes to the device for as long as it is used."""

from lightning_mist.runtime.offload.activations import OffloadedActivations
from lightning_mist.runtime.offload.gradient_offload import OffloadedGradients
from lightning_mist.runtime.offload.optimizer_state import (
    OffloadedState,
    UnitSteps,
    behind_closure,
    offload_optimizer_state,
)
