import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.inputs.regions import RegionWork
from lightning_mist.cost.time.region_times import (
    byte_rate,
    compute_dtype,
    compute_rate,
    operator_seconds,
    work_seconds,
)
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import KernelRate, MemoryRate, catalog_profile, parse_cluster
from tests.cost import paper_time
from tests.specs import profile


def work(*entries, regions=(0,)):
    """Entries are (kind of region, kind of operator, FLOPs, bytes, calls)."""
    of, kinds, flops, moved, calls = zip(*entries, strict=True)
    return RegionWork(
        kinds=kinds,
        of_K=np.array(of),
        flops_K=np.array(flops, dtype=float),
        moved_K=np.array(moved, dtype=float),
        calls_K=np.array(calls, dtype=float),
        of_R=np.array(regions),
    )


def machine(**changes):
    return dataclasses.replace(profile(flops_per_second=1e10, bytes_per_second=1e9), **changes)


def memory(kind, rate, backward=None, sizes=(1.0, 1e9)):
    return MemoryRate(
        kind=kind,
        bytes=sizes,
        forward_bytes_per_second=(rate,) * len(sizes),
        backward_bytes_per_second=(backward or rate,) * len(sizes),
        spread=0.0,
    )


def seconds(item, entries, direction="forward"):
    return operator_seconds(item, entries, "float32", direction)


def test_every_entry_has_the_rate_of_its_kind_and_direction():
    found = machine(rates=(memory("reduction", 5e8, 2.5e8), memory("elementwise", 2e9)))
    entries = work((0, "reduction", 0, 1e8, 1), (0, "elementwise", 0, 1e8, 1), (0, "copy", 0, 1e8, 1))
    # What is not there moves bytes as element-wise operators do.
    np.testing.assert_allclose(seconds(found, entries), [0.2, 0.05, 0.05])
    np.testing.assert_allclose(seconds(found, entries, "backward"), [0.4, 0.05, 0.05])
    np.testing.assert_allclose(seconds(machine(), entries), [0.1, 0.1, 0.1])


def test_many_small_products_take_longer_than_a_large_one():
    entries = work((0, "matmul", 1e9, 0, 1), (0, "matmul", 1e9, 0, 1000))
    np.testing.assert_allclose(seconds(machine(), entries), [0.1, 0.2])


def test_a_product_takes_the_longer_of_computing_and_moving():
    entries = work((0, "matmul", 1e9, 1e8, 1), (0, "matmul", 1e9, 3e8, 1))
    np.testing.assert_allclose(seconds(machine(), entries), [0.1, 0.3])


def test_attention_has_a_rate_of_its_own_by_direction_and_element_type():
    kernel = KernelRate(
        kind="causal_attention",
        dtype="float32",
        forward_flops_per_second=4e10,
        backward_flops_per_second=2e10,
        spread=0.0,
    )
    entries = work((0, "causal_attention", 1e9, 0, 1), (0, "attention", 1e9, 0, 1))
    # Of a kind that is not there, the rate of matrix products.
    np.testing.assert_allclose(seconds(machine(kernels=(kernel,)), entries), [0.025, 0.1])
    np.testing.assert_allclose(seconds(machine(kernels=(kernel,)), entries, "backward"), [0.05, 0.1])
    other = dataclasses.replace(kernel, dtype="bfloat16")
    np.testing.assert_allclose(seconds(machine(kernels=(other,)), entries), [0.1, 0.1])


def test_bytes_per_second_lie_between_those_of_the_sizes_that_were_measured():
    rate = MemoryRate(
        kind="elementwise",
        bytes=(1e4, 1e6),
        forward_bytes_per_second=(1e9, 3e9),
        backward_bytes_per_second=(2e9, 2e9),
        spread=0.0,
    )
    found = byte_rate(machine(rates=(rate,)), "elementwise", "forward", np.array([1.0, 1e4, 1e5, 1e6, 1e9]))
    np.testing.assert_allclose(found, [1e9, 1e9, 2e9, 3e9, 3e9])


def test_a_device_hides_the_faster_of_launching_and_executing_and_a_cpu_does_both():
    found = machine(operator_seconds=0.03)
    entries = work((0, "copy", 0, 1e8, 1), (1, "copy", 0, 1e8, 10), regions=(0, 1, 1))
    ahead = work_seconds(found, entries, "float32", "forward", launches_ahead=True)
    np.testing.assert_allclose(ahead, [0.1, 0.3, 0.3])
    after = work_seconds(found, entries, "float32", "forward", launches_ahead=False)
    np.testing.assert_allclose(after, [0.13, 0.4, 0.4])


def test_a_precision_without_a_rate_is_named():
    with pytest.raises(ProfileError, match=r"no rate for bfloat16.*it has float32"):
        compute_rate(profile(), "bfloat16", 1e6)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "float32"), ("bf16-mixed", "bfloat16"), ("16-true", "float16"), ("64-true", "float64")],
)
def test_compute_dtype(precision, dtype):
    assert compute_dtype(precision) == dtype


def test_an_unknown_precision_is_named():
    with pytest.raises(ValueError, match="'int3'"):
        compute_dtype("int3")


HIDDEN, INNER, LENGTH, HEADS, WORDS = 2048, 8192, 2048, 16, 50304


def gpt_operators(rows):
    """Work of the operators of GPT 1.3B in 16 bits: kind, FLOPs, bytes of forward, and the last two of backward.

    Timed alone, an embedding adds its gradient to one that exists. A causal softmax does not read what it hides; what
    its backward was timed with is not known.
    """
    tokens = rows * LENGTH
    state, scores = 2 * tokens * HIDDEN, 2 * rows * HEADS * LENGTH**2
    found = {}
    for inputs, outputs in ((2048, 2048), (2048, 6144), (2048, 8192), (8192, 2048), (2048, WORDS)):
        flops, moved = 2.0 * tokens * inputs * outputs, 2.0 * (tokens * (inputs + outputs) + inputs * outputs)
        found[f"linear {inputs} to {outputs}"] = ("matmul", flops, moved, 2 * flops, 2 * moved)
    product = 2.0 * rows * HEADS * LENGTH**2 * HIDDEN / HEADS
    for name in ("scores", "values"):
        found[name] = ("matmul", product, 2 * state + scores, 2 * product, 2 * (2 * state + scores))
    found["flash attention"] = ("causal_attention", 2 * product, 4 * state, 5 * product, 8 * state)
    found["gelu"] = ("elementwise", 0.0, 2 * 4 * state, 0.0, 3 * 4 * state)
    found["softmax"] = ("reduction", 0.0, 1.5 * scores, 0.0, 0.0)
    found["layer norm"] = ("reduction", 0.0, 2 * state, 0.0, 3 * state)
    table = 2 * WORDS * HIDDEN
    found["embedding"] = ("index", 0.0, 2 * state, 0.0, state + table)
    return found


@pytest.mark.parametrize(
    ("kind", "names", "rows", "most"),
    [
        ("matmul", ("linear 2048 to 2048", "linear 2048 to 6144", "linear 2048 to 8192"), (2, 8), 0.09),
        ("matmul", ("linear 8192 to 2048", "linear 2048 to 50304"), (2, 8), 0.07),
        ("matmul", ("scores", "values"), (2, 8), 0.08),
        ("causal_attention", ("flash attention",), (2, 8), 0.04),
        ("elementwise", ("gelu",), (2, 8), 0.08),
        # Of fewer rows norms take as long as launching them does.
        ("reduction", ("softmax",), (2, 8), 0.10),
        ("reduction", ("layer norm",), (8,), 0.10),
        ("index", ("embedding",), (2, 8), 0.06),
    ],
)
def test_the_catalog_says_what_operators_take_on_an_l4(kind, names, rows, most):
    """Against op timings at 1050 MHz (tests/cost/paper_time.py names their source)."""
    found = catalog_profile(parse_cluster("1xL4"))
    times = {(item["operator"], item["rows"]): item for item in paper_time.read()["operators"]}
    errors = []
    for size in rows:
        for name in names:
            found_kind, *forward, flops, moved = gpt_operators(size)[name]
            assert found_kind == kind
            for direction, amounts in (("forward", forward), ("backward", (flops, moved))):
                if (name, direction) == ("softmax", "backward"):
                    continue
                calls = 2 if kind == "matmul" and direction == "backward" else 1
                entries = [(0, kind, *amounts, calls)]
                if name == "embedding" and direction == "backward":
                    entries.append((0, "elementwise", 0.0, 3 * 2.0 * WORDS * HIDDEN, 1))
                predicted = operator_seconds(found, work(*entries), "float16", direction).sum()
                errors.append(predicted / times[name, size][direction] - 1)
    assert np.abs(errors).mean() <= most
