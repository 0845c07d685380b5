import pytest

from benchmarks.accuracy import published_l4


def test_rates_of_operators_by_themselves_are_those_of_the_device():
    profile = published_l4.measured(2, is_sustained=False)
    half = next(rate for rate in profile.compute if rate.dtype == "float16")
    # 58 of the 60 multiprocessors that 121 TFLOP/s at 2040 MHz belong to, at the 1050 MHz that clocks were locked to.
    peak = 121e12 * 1050 / 2040
    assert all(rate < peak for rate in half.flops_per_second)
    assert half.flops_per_second[-1] > 0.85 * peak
    assert tuple(sorted(half.flops)) == half.flops
    # Memory moves 300 GB/s at most, so that no rate comes from the cache.
    for rate in profile.rates:
        for seconds in (*rate.forward_bytes_per_second, *rate.backward_bytes_per_second):
            assert 0.7 * 300e9 < seconds < 300e9


def test_large_products_are_held_to_what_the_device_sustains():
    free, held = (published_l4.measured(2, is_sustained=value) for value in (False, True))
    sustained = next(r for r in published_l4.catalog(2).compute if r.dtype == "float16").flops_per_second[-1]
    for name, profile in (("free", free), ("held", held)):
        rates = next(r for r in profile.compute if r.dtype == "float16").flops_per_second
        assert (max(rates) <= sustained) == (name == "held")
    assert free.rates == held.rates


def test_scores_that_a_causal_mask_hides_count():
    (kernel,) = published_l4.measured(2).kernels
    # Half of the counted scores are computed, so real rates are below the peak at these clocks.
    peak = 121e12 * 1050 / 2040
    assert 0.5 * kernel.backward_flops_per_second < 0.5 * kernel.forward_flops_per_second < peak


def test_small_operators_tell_nothing_of_memory():
    moved = [found for timing in published_l4.timings() for found in published_l4._moved(timing)]
    cached = [size / seconds for _, size, seconds in moved if size < published_l4.CACHE_BYTES]
    assert max(size / seconds for _, size, seconds in moved) > 900e9
    assert cached


def test_collectives_are_the_catalogs():
    assert published_l4.measured(2).collectives == published_l4.catalog(2).collectives
    assert published_l4.cluster(8).world_size == 8
    with pytest.raises(FileNotFoundError):
        published_l4.timings(published_l4.OPERATORS.with_name("nothing.json"))
