"""Profiles of other kernels than eager torch's: what changes, what does not, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost.inputs import RegionWork
from lightning_mist.cost.time.region_times import work_seconds
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import HardwareProfile, catalog_profile, parse_cluster
from lightning_mist.hardware.catalog import STACKS, with_stack


def seconds(profile: HardwareProfile, kind: str, *, flops: float = 0.0, moved: float = 1e9, calls: int = 1) -> float:
    one = (np.array([value], dtype=float) for value in (flops, moved, calls))
    flops_K, moved_K, calls_K = one
    work = RegionWork(
        kinds=(kind,),  # type: ignore[arg-type]
        of_K=np.array([0]),
        flops_K=flops_K,
        moved_K=moved_K,
        calls_K=calls_K,
        of_R=np.array([0]),
    )
    return float(work_seconds(profile, work, "bfloat16", "forward", launches_ahead=True, head_width=128)[0])


def profile_of(stack: str, device: str = "8xH100") -> HardwareProfile:
    return with_stack(catalog_profile(parse_cluster(device)), stack)


def test_eager_is_the_catalogs_own_profile() -> None:
    eager = catalog_profile(parse_cluster("8xH100"))
    assert with_stack(eager, "eager") is eager
    assert eager.stack == "eager"


@pytest.mark.parametrize("stack", sorted(set(STACKS) - {"eager"}))
def test_products_and_collectives_are_the_same_in_every_stack(stack: str) -> None:
    eager, found = profile_of("eager"), profile_of(stack)
    assert found.stack == stack
    assert (found.compute, found.collectives) == (eager.compute, eager.collectives)


def test_compiled_and_fused_blocks_save_bytes_and_launches() -> None:
    eager, compiled, fused = map(profile_of, ("eager", "compiled", "fused"))
    for kind in ("elementwise", "copy"):
        assert seconds(compiled, kind) == seconds(fused, kind) == pytest.approx(0.36 * seconds(eager, kind))
    assert seconds(fused, "reduction") < seconds(compiled, "reduction") < seconds(eager, "reduction")
    assert seconds(compiled, "index") == seconds(eager, "index")
    small = {"moved": 1e3, "calls": 1000}
    assert seconds(fused, "elementwise", **small) == pytest.approx(0.5 * seconds(eager, "elementwise", **small))
    whole = {"kind": "causal_attention", "flops": 1e13, "moved": 5e9}
    assert seconds(fused, **whole) == seconds(eager, **whole)


def test_older_attention_is_slower_on_hopper() -> None:
    whole = {"kind": "causal_attention", "flops": 1e13, "moved": 5e9}
    eager, flash2, triton = (seconds(profile_of(stack), **whole) for stack in ("eager", "flash2", "triton"))
    assert 1.6 < flash2 / eager < 2.2
    assert 1.7 < triton / flash2 < 2.3
    ampere = [seconds(profile_of(stack, "8xA100-80"), **whole) for stack in ("eager", "flash2")]
    assert ampere[0] == ampere[1]


def test_what_is_not_known_is_refused() -> None:
    eager = catalog_profile(parse_cluster("8xB200"))
    with pytest.raises(ProfileError, match=r"stack = 'jax': whose kernels to price is one of eager, compiled, fused"):
        with_stack(eager, "jax")
    with pytest.raises(ProfileError, match=r"capability 8\.x, 9\.x, not on B200; use eager"):
        with_stack(eager, "triton")
    with pytest.raises(ProfileError, match="known of machines of the catalog only"):
        with_stack(replace(eager, source="measured"), "fused")
    with pytest.raises(ProfileError, match="is of fused kernels"):
        with_stack(with_stack(eager, "fused"), "compiled")
