"""What is kept in host memory and comes to the device for as long as it is used."""

from lightning_mist.runtime.offload.activations import OffloadedActivations
from lightning_mist.runtime.offload.gradient_offload import OffloadedGradients
from lightning_mist.runtime.offload.optimizer_state import OffloadedState, offload_optimizer_state
from lightning_mist.runtime.offload.unit_steps import UnitSteps, behind_closure
