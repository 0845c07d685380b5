from dataclasses import replace

import pytest

from lightning_mist.explain.explanation import Kind, differences

KIND = Kind(stages=2, tensor=(1,), zero=(0,), checkpointing=False, offload=("optimizer",), schedule="1f1b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"stages": 1}, ("1 stage in place of 2 stages",)),
        ({"tensor": (2,)}, ("tensor parallelism over 2 devices",)),
        ({"tensor": (1, 2, 4)}, ("tensor parallelism over 2 and 4 devices on some stages",)),
        ({"zero": (0, 1, 3)}, ("no ZeRO, ZeRO-1 and ZeRO-3 in place of no ZeRO",)),
        ({"checkpointing": True}, ("recomputes layers",)),
        ({"offload": ()}, ("does not offload optimizer state",)),
        ({"offload": ("parameters", "optimizer", "activations")}, ("offloads parameters and activations",)),
        ({"schedule": "zb-h1"}, ("schedule zb-h1 in place of 1f1b",)),
    ],
)
def test_what_another_kind_does_differently(changes, words):
    assert differences(KIND, replace(KIND, **changes)) == words


def test_one_stage_has_no_schedule_to_speak_of():
    other = replace(KIND, stages=1)
    assert differences(replace(KIND, schedule="zb-h1"), other) == ("1 stage in place of 2 stages",)
    assert differences(other, replace(KIND, schedule="zb-h1")) == ("2 stages in place of 1 stage",)


def test_the_way_back_is_told_too():
    other = replace(KIND, tensor=(2,), checkpointing=True)
    assert differences(other, KIND) == ("no tensor parallelism", "recomputes no layer")
