"""Fused attention priced by kernel, width, direction, mask, length and work of a launch, against measurements."""

import numpy as np
import pytest

from lightning_mist.cost.inputs import RegionWork
from lightning_mist.cost.time.region_times import operator_seconds
from lightning_mist.hardware import catalog_profile, parse_cluster


def microseconds(
    device: str, direction: str, *, batch: int, heads: int, length: int, width: int, causal: bool, shared: int = 1
) -> float:
    """Seconds that one launch takes by the catalog."""
    forward = direction == "forward"
    size = 2 * batch * heads * length * width
    tensors = (2 + 2 / shared) if forward else (4 + 4 / shared)
    work = RegionWork(
        kinds=("causal_attention" if causal else "attention",),
        of_K=np.array([0]),
        flops_K=np.array([(4.0 if forward else 10.0) * batch * heads * length**2 * width]),
        moved_K=np.array([tensors * size]),
        calls_K=np.array([1.0]),
        of_R=np.array([0]),
    )
    profile = catalog_profile(parse_cluster(device))
    return 1e6 * float(operator_seconds(profile, work, "bfloat16", direction, width)[0])  # type: ignore[arg-type]


# TFLOP/s of what must be done, as published: (device, direction, batch, heads, length, width, causal).
MEASURED = {
    ("A100-80", "forward", 2, 64, 2048, 128, True): 180,
    ("A100-80", "forward", 2, 64, 16384, 128, False): 204,
    ("A100-80", "backward", 2, 64, 4096, 128, True): 168,
    ("A100-80", "backward", 1, 32, 8192, 256, True): 137,
    ("H200", "forward", 2, 64, 2048, 128, True): 535,
    ("H200", "backward", 2, 64, 8192, 128, True): 526,
    ("H200", "backward", 1, 32, 4096, 256, True): 354,
    ("H100", "forward", 4, 32, 4096, 64, True): 363,
    ("H100", "backward", 4, 32, 4096, 64, False): 417,
    ("GB200", "forward", 2, 64, 2048, 128, True): 1097,
    ("GB200", "backward", 2, 64, 16384, 128, True): 1328,
    ("B200", "forward", 1, 128, 32768, 128, True): 1515,
    ("RTX4090", "forward", 8, 16, 2048, 128, True): 151,
    ("RTX4090", "backward", 8, 16, 2048, 128, True): 99,
    ("RTXPRO6000", "forward", 2, 64, 4096, 128, True): 363,
}


@pytest.mark.parametrize("case", sorted(MEASURED, key=str), ids=str)
def test_kernels_are_as_fast_as_they_were_measured(case) -> None:
    device, direction, batch, heads, length, width, causal = case
    found = microseconds(device, direction, batch=batch, heads=heads, length=length, width=width, causal=causal)
    done = (4.0 if direction == "forward" else 10.0) * batch * heads * length**2 * width / (2 if causal else 1)
    assert done / found / 1e6 == pytest.approx(MEASURED[case], rel=0.12)


def test_narrow_heads_are_slower_on_blackwell_and_hardly_on_ampere() -> None:
    sizes = {"batch": 4, "length": 8192, "causal": True}
    for device, least, most in (("B200", 1.5, 2.0), ("A100-80", 1.0, 1.2)):
        narrow = microseconds(device, "forward", heads=32, width=64, **sizes)
        wide = microseconds(device, "forward", heads=16, width=128, **sizes)
        assert least < narrow / wide < most


def test_a_width_between_is_between_and_one_beyond_is_as_the_last() -> None:
    rates = [
        width / microseconds("H100", "forward", batch=8, heads=16, length=8192, width=width, causal=False)
        for width in (64, 96, 128, 256, 512)
    ]
    assert rates[0] < rates[1] < rates[2]
    assert rates[3] == pytest.approx(rates[4], rel=0.02)


def test_shared_keys_change_little_and_small_launches_leave_multiprocessors_idle() -> None:
    sizes = {"batch": 1, "heads": 32, "length": 8192, "width": 128, "causal": True}
    own = microseconds("H100", "forward", **sizes)
    assert microseconds("H100", "forward", shared=4, **sizes) == pytest.approx(own, rel=0.06)
    few = {**sizes, "heads": 4, "length": 2048}
    many = {**few, "batch": 16}
    assert microseconds("H100", "forward", **few) > 1.5 / 16 * microseconds("H100", "forward", **many)
