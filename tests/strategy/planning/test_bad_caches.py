import random

import pytest
import torch

from benchmarks.faults.bad_cache_cases import cache_works
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import catalog_profile, detect, save_profile
from lightning_mist.strategy.planning.local_machine import rates_to_measure


def test_damaged_measurements_are_left_aside_with_a_reason_or_are_numbers(tmp_path):
    """Some of those that ``benchmarks.faults.bad_runs`` tries; each fails if a number is none."""
    reasons, tried = [], 0
    for _, _, work in cache_works(tmp_path, random.Random(2), 8):
        tried += 1
        try:
            work()
        except ProfileError as reason:
            reasons.append(str(reason))
    assert tried > len(reasons) > 100
    assert [text for text in reasons if not any(word in text for word in ("ignored", "is not used", "measure"))] == []


@pytest.mark.parametrize("name", ["zzz", "nn", "", "float32x"])
def test_a_rate_of_what_is_no_element_type_is_not_measured_again(tmp_path, name):
    machine = detect(2, 1, "cpu")
    path = save_profile(catalog_profile(machine), tmp_path, machine)
    last = path.read_text().rpartition('"dtype": "')
    path.write_text("".join([*last[:2], name, '"', last[2].partition('"')[2]]))
    assert f'"dtype": "{name}"' in path.read_text()
    found = rates_to_measure(tmp_path, machine, [torch.float32])
    assert found[0] == torch.float32
    assert all(isinstance(item, torch.dtype) for item in found)
