import pytest

from lightning_mist.tuner.inter_stage import suffix_dp


@pytest.fixture(params=["small", "in slices", "large"])
def look_up(request, monkeypatch):
    """How states behind stages are looked up: as in small problems, a few options at a time, as in large ones."""
    if request.param == "in slices":
        monkeypatch.setattr(suffix_dp, "_AT_ONCE", 50)
    if request.param == "large":
        monkeypatch.setattr(suffix_dp, "MOST_PADDED", 0)
        monkeypatch.setattr(suffix_dp, "_FEW", 0)
