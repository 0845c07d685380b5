import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile.interference_model import CHANNELS, COEFFICIENTS, seconds_together, speed_table
from lightning_mist.tuner.load_weights import COMPUTE, TO_HOST, load_weights
from tests.tiers import examples

SHARE = st.floats(0, 1, allow_subnormal=False)


@st.composite
def machines(draw):
    return Interference(**{name: draw(SHARE) for name in COEFFICIENTS}, source="drawn")


@settings(max_examples=examples(60))
@given(machines(), st.booleans(), st.lists(st.floats(0, 10, allow_subnormal=False), min_size=8, max_size=8))
def test_loads_take_at_least_what_their_weights_say_together_or_one_after_the_other(machine, across, numbers):
    first, then = np.array(numbers).reshape(2, len(CHANNELS), 1)
    table, weights_WC = speed_table(machine, across), load_weights(machine, across)
    whole = seconds_together(first + then, table)
    parts = seconds_together(first, table) + seconds_together(then, table)
    assert (weights_WC @ (first + then) <= np.minimum(whole, parts) * (1 + 1e-9) + 1e-12).all()


@settings(max_examples=examples(30))
@given(machines(), st.booleans())
def test_the_channel_that_is_favoured_counts_in_full(machine, across):
    weights_WC = load_weights(machine, across)
    np.testing.assert_allclose(np.diag(weights_WC), 1.0)
    assert (weights_WC >= 0).all()


def test_channels_that_are_free_of_each_other_count_for_nothing_beside_the_favoured_one():
    free = Interference(**dict.fromkeys(COEFFICIENTS, 0.0), source="free")
    np.testing.assert_allclose(load_weights(free, False), np.eye(len(CHANNELS)))


@pytest.mark.parametrize("machine", [None, Interference(**dict.fromkeys(COEFFICIENTS, 1.0), source="in turns")])
def test_what_takes_turns_adds_up(machine):
    weights_WC = load_weights(machine, False)
    np.testing.assert_allclose(weights_WC[COMPUTE], 1.0)
    np.testing.assert_allclose(weights_WC[TO_HOST], 1.0)
