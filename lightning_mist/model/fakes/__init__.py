"""Modules and batches without values, on which steps are run to look at them."""

from lightning_mist.model.fakes.batches import convert_batch, device_of, resize_batch, sequence_length
from lightning_mist.model.fakes.fake_modules import (
    address_of,
    fake_like,
    fake_parameters,
    has_values,
    quiet_fakes,
    renew_flat_weights,
    state_of,
    storage_of,
)
from lightning_mist.model.fakes.isolate import intercepted, isolated, substitute_parameters
from lightning_mist.model.fakes.origins import NOWHERE, Origin, Origins
from lightning_mist.model.fakes.reads import Guesses, Read, describe_guesses, guess, too_many
from lightning_mist.model.fakes.trace_failures import find_obstacle, refusal
from lightning_mist.model.fakes.trial_values import (
    Slot,
    WithoutDropout,
    convert,
    convert_plain_tensors,
    filled,
    kept_slots,
    put,
    slots_of,
    thin,
)
