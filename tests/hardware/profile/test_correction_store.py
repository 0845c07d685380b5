import dataclasses
import json

import pytest

from lightning_mist.hardware import Correction, correction_store, load_corrections, save_corrections
from tests.hardware.profile.test_profile_files import CLUSTER, PROFILE

CORRECTIONS = (
    Correction(term="forward", factor=1.1, ratios=(1.1, 1.3, 1.1)),
    Correction(term="update", factor=0.75, ratios=(0.5,)),
)


@pytest.fixture
def store(tmp_path):
    return correction_store(tmp_path / "cache", CLUSTER, "bf16-mixed", PROFILE)


def test_kept_and_found(store):
    assert load_corrections(store) == ((), None)
    save_corrections(store, CORRECTIONS)
    assert load_corrections(store) == (CORRECTIONS, None)
    assert [file.name for file in store.path.parent.iterdir()] == [store.path.name]
    assert store.path.name.startswith("corrections-bf16-mixed-1x2xcpu-")


def test_devices_and_precisions_have_their_own(store, tmp_path):
    save_corrections(store, CORRECTIONS)
    more = dataclasses.replace(CLUSTER, devices_per_node=4)
    for other in (
        correction_store(tmp_path / "cache", more, "bf16-mixed", PROFILE),
        correction_store(tmp_path / "cache", CLUSTER, "32-true", PROFILE),
    ):
        assert other.path != store.path
        assert load_corrections(other) == ((), None)


def test_a_profile_that_was_measured_again_makes_them_void(store, tmp_path):
    save_corrections(store, CORRECTIONS)
    again = dataclasses.replace(PROFILE, source="measured on a test, 2030-01-01")
    found, warning = load_corrections(correction_store(tmp_path / "cache", CLUSTER, "bf16-mixed", again))
    assert found == ()
    assert "learned for profile measured on a test, 2020-01-01, not measured on a test, 2030-01-01" in warning


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: "{", "cannot be read"),
        (lambda content: "[" * 3000, "cannot be read"),
        (lambda content: [], "have schema None, schema 2 is read"),
        (lambda content: content | {"schema": 7}, "have schema 7, schema 2 is read"),
        (lambda content: content | {"corrections": [{"term": "forward"}]}, "are not corrections of schema 2"),
        (lambda content: _first(content, term="nothing"), "no predictions have the term 'nothing'"),
        (lambda content: _first(content, factor=7.0), "a factor of 7.0 from runs"),
        (lambda content: _first(content, factor=float("nan")), "nan in place of a number"),
        (lambda content: _first(content, factor=1.2), "a factor of 1.2 from runs"),
        (lambda content: _first(content, factor=1.0, ratios=[]), "a factor of 1.0 from runs"),
        (lambda content: _first(content, factor=1.0, ratios=[1.0] * 10), "a factor of 1.0 from runs"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_reason(store, spoil, said):
    save_corrections(store, CORRECTIONS)
    spoiled = spoil(json.loads(store.path.read_text()))
    store.path.write_text(spoiled if isinstance(spoiled, str) else json.dumps(spoiled))
    found, warning = load_corrections(store)
    assert found == ()
    assert said in warning
    assert "ignored" in warning


def _first(content, **changes):
    first, *rest = content["corrections"]
    return content | {"corrections": [first | changes, *rest]}
