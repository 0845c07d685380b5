import pytest

from lightning_mist.tuner.inter_stage import suffix_dp


@pytest.fixture(params=["at once", "in slices"])
def look_up(request, monkeypatch):
    """How states behind stages are looked up: all at once, or a few options at a time."""
    if request.param == "in slices":
        monkeypatch.setattr(suffix_dp, "_AT_ONCE", 50)
