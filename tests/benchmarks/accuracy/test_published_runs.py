"""Published step times: what rows say, which plans they become, and how they are scored."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.accuracy.published_replay import (
    MASTERS,
    MISSING,
    STAND_INS,
    Replay,
    at_length,
    machine_of,
    missing_of,
    needs_of,
    plan_of,
    profile_of,
    replay,
    spec_of,
)
from benchmarks.accuracy.published_rows import UnpredictableError
from benchmarks.accuracy.published_run_rows import PublishedRun, read_runs
from benchmarks.accuracy.published_runs import rank_correlation, sample_of, summary
from benchmarks.accuracy.published_sharing import evenly_shared, in_collectives
from lightning_mist.cost.time.region_times import collective_seconds
from lightning_mist.plan import ZeroStage

RUNS, SIZES = read_runs()
SMALL = {"hidden": 64, "ffn": 256, "layers": 4, "heads": 2, "vocabulary": 128, "bias": True, "tied": True}
RUN = PublishedRun(
    id="a",
    source="s",
    model="small",
    gpu="A100-80",
    nodes=1,
    devices=4,
    length=512,
    micro=2,
    batch=16,
    precision="bf16, float32 masters",
    recompute="full",
    stack="eager",
    zero=3,
    seconds=1.0,
)


def test_there_are_enough_rows_and_both_halves_have_every_kind_of_device():
    said = [run for run in RUNS if run.seconds is not None and not missing_of(run)]
    assert len(said) >= 60
    for half in ("fit", "held out"):
        rows = [run for run in said if run.half == half]
        assert 0.4 < len(rows) / len(said) < 0.6
        assert {"A100-40", "A100-80", "H100"} <= {run.gpu for run in rows}
    assert len({run.id for run in RUNS}) == len(RUNS)


def test_the_half_of_a_row_depends_on_its_id_alone():
    assert replace(RUN, seconds=2.0, gpu="H100").half == RUN.half
    assert {replace(RUN, id=str(number)).half for number in range(9)} == {"fit", "held out"}


def test_every_word_of_every_row_is_priced_or_said_to_be_missing():
    words = {word for run in RUNS for word in needs_of(run)}
    assert words - {"context parallelism"} <= STAND_INS.keys() | MISSING.keys()
    assert not STAND_INS.keys() & MISSING.keys()


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [("seconds", 3.0, 3.0), ("samples/s", 8.0, 2.0), ("tokens/s", 1024.0, 8.0), ("tokens/s/GPU", 1024.0, 2.0)],
)
def test_figures_become_seconds_of_a_step(tmp_path, unit, value, seconds):
    shared = {name: getattr(RUN, name) for name in ("model", "gpu", "nodes", "devices", "length", "micro", "batch")}
    shared |= {"precision": RUN.precision, "recompute": "none", "stack": "eager", "unit": unit}
    sources = [{"name": "s", "shared": shared, "columns": ["id", "value"], "rows": [["a", value], ["b", None]]}]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"models": {"small": SMALL}, "sources": sources}), encoding="utf-8")
    runs, _ = read_runs(path)
    assert [run.seconds for run in runs] == [seconds, None]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([["a"]], "columns"), ([["a", 1.0], ["a", 1.0]], "used twice")],
)
def test_rows_that_do_not_match_their_columns_are_refused(tmp_path, rows, message):
    shared = {name: getattr(RUN, name) for name in ("model", "gpu", "nodes", "devices", "length", "micro", "batch")}
    shared |= {"precision": RUN.precision, "recompute": "none", "stack": "eager", "unit": "seconds"}
    sources = [{"name": "s", "shared": shared, "columns": ["id", "value"], "rows": rows}]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"models": {"small": SMALL}, "sources": sources}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_runs(path)


def test_a_plan_has_the_run_s_degrees_and_microbatches():
    plan = plan_of(replace(RUN, nodes=2, tensor=2, pipeline=2, zero=1, batch=24), 4)
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)] or plan.world_size == 8
    assert plan.num_microbatches == 6
    assert {stage.zero_stage for stage in plan.stages} == {ZeroStage.OPTIMIZER}
    assert [stage.checkpointing.layers for stage in plan.stages] == [2, 2]


def test_chunks_of_a_pipeline_share_devices():
    plan = plan_of(replace(RUN, pipeline=2, chunks=2, batch=16), 4)
    assert plan.schedule == "interleaved-1f1b"
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_layers_that_stages_do_not_divide_are_not_said():
    with pytest.raises(UnpredictableError, match="equal stages"):
        plan_of(replace(RUN, pipeline=2), 5)


def test_what_is_missing_is_named_and_nothing_is_priced():
    run = replace(RUN, recompute="selective op", beside=("float8",))
    assert len(missing_of(run)) == 2
    with pytest.raises(UnpredictableError, match=r"float8.*selective op"):
        replay(run, SMALL)


def test_the_network_of_a_source_is_the_machine_s():
    wide = machine_of(replace(RUN, nodes=2, network="1600 Gbit/s"))
    each = machine_of(replace(RUN, nodes=2, network="400 Gbit/s a device"))
    assert wide.inter_node is not None
    assert wide.inter_node.bytes_per_second == 200e9
    assert each.inter_node is not None
    assert each.inter_node.bytes_per_second == 4 * 50e9
    assert machine_of(replace(RUN, network="1600 Gbit/s")).inter_node is None


def test_a_trace_of_one_length_is_that_of_another():
    sizes = tuple(sorted(SMALL.items()))
    long = spec_of(replace(RUN, length=2048), sizes)
    short = at_length(long, 512)
    tables = {item.name: item.numel for item in short.parameters}
    assert tables["positions.weight"] == 512 * 64
    assert at_length(short, 2048) == long


def test_a_run_is_priced_and_says_as_what():
    found = replay(RUN, SMALL)
    assert found.stand_ins == (MASTERS,)
    assert 0 < found.seconds <= found.own_seconds
    assert found.estimate.verdict == "fits"


def test_evenly_shared_parameters_are_as_many_bytes_in_one_collective():
    sizes = tuple(sorted(SMALL.items()))
    spec = spec_of(RUN, sizes)
    even = evenly_shared(spec, 4)
    whole = sum(item.bytes for item in spec.parameters)
    assert whole <= sum(item.bytes for item in even.parameters) <= whole + 8 * len(even.parameters)
    profile = profile_of(RUN, machine_of(RUN))
    one = collective_seconds(profile, "all_gather", 4, 1, 1e6)
    four = collective_seconds(in_collectives(profile), "broadcast", 4, 1, 1e6, 4)
    assert float(four) == pytest.approx(float(one))


def test_ranks_of_what_grows_together_agree():
    assert rank_correlation([(1, 10), (2, 20), (3, 90)]) == 1
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == -1
    assert rank_correlation([(1, 5), (1, 5)]) == 0


def _sample(number, seconds, verdict="fits", ran=True, **more):
    run = replace(RUN, id=str(number), seconds=1.0 if ran else None, **more)
    interval = SimpleNamespace(p50=104)
    worst = SimpleNamespace(allocated=interval, reserved=interval, device_total=interval)
    estimate = SimpleNamespace(worst=worst, verdict=verdict)
    return sample_of(run, lambda: Replay(seconds=seconds, own_seconds=seconds, estimate=estimate, stand_ins=()))


def test_a_summary_has_errors_biases_wrong_verdicts_and_what_is_missing():
    samples = [_sample(number, 1.2) for number in range(20)]
    samples.append(_sample("big", 1.2, verdict="does not fit"))
    samples.append(_sample("small", 1.2, ran=False))
    samples.append(_sample("peak", 1.2, memory_bytes=100, memory_metric="allocated"))
    samples.append(sample_of(RUN, lambda: replay(replace(RUN, beside=("float8",)), SMALL)))
    text = summary(samples)
    assert "median error 20.0%" in text
    assert "A100-80: bias +20.0%" in text
    assert "s: median error 20.0%, bias +20.0%, rank correlation 0.000" in text
    assert "ran, called impossible: 1 of 22 (big)" in text
    assert "ran out of memory, called fitting: 1 of 1 (small)" in text
    assert "peaks allocated, of runs priced as what they are: 1 rows, median error 4.0%, within 5 %: 100%" in text
    assert "not said, float8: products in float8 have no price: 1 rows (a)" in text
