"""Modules and batches without values, on which steps are run to look at them."""

from lightning_mist.model.fakes.fake_modules import (
    Slot,
    WithoutDropout,
    address_of,
    convert,
    convert_batch,
    convert_plain_tensors,
    device_of,
    fake_like,
    filled,
    has_values,
    parameter_slots,
    put,
    quiet_fakes,
    renew_flat_weights,
    resize_batch,
    slots_of,
    state_of,
    storage_of,
    thin,
)
from lightning_mist.model.fakes.isolate import fake_parameters, isolated, substitute_parameters
from lightning_mist.model.fakes.origins import (
    NOWHERE,
    Guesses,
    Origin,
    Origins,
    TensorRead,
    describe_guesses,
    find_obstacle,
    guess,
    refusal,
    too_many,
)
