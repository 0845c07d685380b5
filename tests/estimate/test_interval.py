import pytest

from lightning_mist.estimate.device_need import Interval


def test_intervals_have_an_order():
    assert max(Interval(p50=1, p95=5), Interval(p50=2, p95=3)) == Interval(p50=2, p95=3)


@pytest.mark.parametrize("values", [(-1, 3), (4, 3)])
def test_what_is_no_interval_is_refused(values):
    with pytest.raises(ValueError, match=rf"p50 = {values[0]}, p95 = {values[1]}"):
        Interval(p50=values[0], p95=values[1])
