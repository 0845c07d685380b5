"""Published step times: what rows say, which plans they become, and how they are scored."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.accuracy.published_kernel_choices import overlapped_exchange, unfused_attention
from benchmarks.accuracy.published_machines import (
    AFTER,
    FLASH2,
    HELD,
    WAITING,
    WIDE,
    machine_of,
    profile_of,
    without_chains,
)
from benchmarks.accuracy.published_recompute import recomputed
from benchmarks.accuracy.published_replay import (
    MISSING,
    PRICED,
    STAND_INS,
    Replay,
    at_length,
    missing_of,
    needs_of,
    plan_of,
    replay,
    spec_of,
    verdict_of,
)
from benchmarks.accuracy.published_rows import UnpredictableError
from benchmarks.accuracy.published_run_rows import PublishedRun, read_runs
from benchmarks.accuracy.published_runs import rank_correlation, sample_of, summary
from benchmarks.accuracy.published_sharing import evenly_shared, in_collectives
from lightning_mist.cost.time.region_times import collective_seconds
from lightning_mist.model.spec import MICROBATCH, SEQUENCE
from lightning_mist.plan import StageMethod, ZeroStage
from tests.specs import moved_bytes

RUNS, SIZES = read_runs()
SMALL = {"hidden": 64, "ffn": 256, "layers": 2, "heads": 2, "vocabulary": 128, "bias": True, "tied": True}
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
    assert words - {"context parallelism"} <= STAND_INS.keys() | MISSING.keys() | PRICED
    assert not STAND_INS.keys() & MISSING.keys()
    assert not PRICED & (STAND_INS.keys() | MISSING.keys())


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
    run = replace(RUN, recompute="all but norms", beside=("float8",))
    assert len(missing_of(run)) == 2
    with pytest.raises(UnpredictableError, match=r"float8.*all but norms"):
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
    found = replay(replace(RUN, beside=("fused loss",)), SMALL)
    assert found.stand_ins == ("fused loss",)
    assert 0 < found.seconds <= found.own_seconds
    assert found.verdict == found.estimate.verdict == "fits"


def test_masters_are_the_project_s_own():
    sizes = tuple(sorted(SMALL.items()))
    with_masters, without = spec_of(RUN, sizes), spec_of(replace(RUN, precision="bf16"), sizes)
    assert with_masters.master_weights
    assert not without.master_weights
    assert WIDE in needs_of(replace(RUN, precision="bf16, float32 masters, accumulation in float32"))


def test_every_second_product_runs_again_between_none_of_them_and_all():
    sizes = {"hidden": 64, "ffn": 256, "layers": 2, "heads": 2, "vocabulary": 128, "feed_forward": "swiglu"}
    sizes |= {"norm": "rmsnorm", "positions": "rotary"}
    spec = spec_of(RUN, tuple(sorted(sizes.items())))
    half = recomputed(spec, "selective op", sizes).computing(StageMethod(checkpointing="selective")).layers[0]
    least, most = spec.computing(StageMethod(checkpointing="selective")).layers[0], spec.layers[0]

    def products(work):
        return sum(item.flops for item in work if item.kind == "matmul")

    at = {MICROBATCH: 1, SEQUENCE: 512}
    assert least.recompute_work is not None
    assert half.recompute_work is not None
    again = products(half.recompute_work)
    assert products(least.recompute_work) == 0 < again.subs(at) < products(most.forward_work).subs(at)
    assert half.checkpointed_saved_bytes.subs(at) < least.checkpointed_saved_bytes.subs(at)
    run = replace(RUN, recompute="selective op")
    assert {stage.checkpointing.kind for stage in plan_of(run, 4).stages} == {"selective"}
    times = [
        replay(replace(RUN, recompute=word, precision="bf16"), sizes).seconds
        for word in ("none", "selective op", "full")
    ]
    assert times == sorted(times)
    with pytest.raises(UnpredictableError, match="Llama"):
        recomputed(spec_of(RUN, tuple(sorted(SMALL.items()))), "selective op", SMALL)


def test_attention_that_runs_again_is_part_of_backward():
    spec = spec_of(RUN, tuple(sorted(SMALL.items())))
    layer = recomputed(spec, "attention", SMALL).layers[0]
    kinds = [item.kind for item in layer.backward_work]
    assert kinds.count("causal_attention") == 2
    assert layer.saved_bytes == spec.layers[0].saved_bytes
    assert recomputed(spec, "full", SMALL) is spec


def test_unfused_attention_writes_every_score():
    spec = spec_of(RUN, tuple(sorted(SMALL.items())))
    layer, fused = unfused_attention(spec, SMALL).layers[0], spec.layers[0]
    assert not any(item.kind.endswith("attention") for item in (*layer.forward_work, *layer.backward_work))
    scores = 2 * 3 * SMALL["heads"] * 512**2
    at = {MICROBATCH: 3, SEQUENCE: 512}
    assert (layer.saved_bytes - fused.saved_bytes).subs(at) == scores
    assert (layer.forward_flops - fused.forward_flops).subs(at) == 0
    repeated = unfused_attention(recomputed(spec, "attention", SMALL), SMALL).layers[0]
    assert repeated.saved_bytes == fused.saved_bytes
    assert (repeated.backward_flops - layer.backward_flops).subs(at) == 4 * 3 * SMALL["hidden"] * 512**2
    dropping = unfused_attention(spec, {**SMALL, "dropout": 0.1}).layers[0]
    assert float((moved_bytes(dropping.forward_work) - moved_bytes(layer.forward_work)).subs(at)) == 2.5 * scores


def test_fused_layers_keep_less_and_gather_again():
    run = replace(RUN, tensor=2)
    sizes = {"hidden": 256, "ffn": 1024, "layers": 4, "heads": 4, "vocabulary": 1024}
    whole, fused = (spec_of(replace(run, stack=stack), tuple(sorted(sizes.items()))) for stack in ("eager", "fused"))
    at = {MICROBATCH: 1, SEQUENCE: 512}
    kept, less = (float(spec.split(2, True).layers[0].saved_bytes.subs(at)) for spec in (whole, fused))
    assert kept - less == 2 * 512 * 256 * 2 / 2
    peaks = [float(spec.split(2, True).layers[0].backward_peak_bytes.subs(at)) for spec in (whole, fused)]
    assert peaks[1] - peaks[0] == 2 * 512 * 256


def test_exchanges_beside_products_cost_what_they_slow_down():
    run = replace(RUN, tensor=2, beside=("exchanges beside products",))
    sizes = {"hidden": 256, "ffn": 1024, "layers": 4, "heads": 4, "vocabulary": 1024}
    before = spec_of(replace(run, beside=()), tuple(sorted(sizes.items())))
    hidden = overlapped_exchange(before, 0.25)

    def exchanged(spec):
        layer = spec.split(2, True).layers[0]
        return {
            item.operation: float(item.bytes.subs({MICROBATCH: 1, SEQUENCE: 512}))
            for item in layer.backward_collectives
        }

    left, whole = exchanged(hidden), exchanged(before)
    assert left["reduce_scatter"] == whole["reduce_scatter"] / 4
    assert left["all_gather"] == whole["all_gather"]
    split, unshared = (spec.split(2, False).layers[0].backward_collectives for spec in (before, hidden))
    assert {item.operation for item in split} == {"all_reduce"}
    assert [float(item.bytes / other.bytes) for item, other in zip(unshared, split, strict=True)] == [0.25]
    assert exchanged(spec_of(run, tuple(sorted(sizes.items()))))["reduce_scatter"] < whole["reduce_scatter"]


def test_machines_are_slower_by_what_sources_say_of_them():
    run = replace(RUN, gpu="H100")
    machine = machine_of(run)
    plain = profile_of(run, machine, "eager", ())
    held, waiting = (profile_of(run, machine, "eager", (word,)) for word in (HELD, WAITING))
    assert 0.7 < held.compute[0].flops_per_second[-1] / plain.compute[0].flops_per_second[-1] < 0.9
    assert waiting.compute[-1].flops_per_second[0] < plain.compute[-1].flops_per_second[0]
    assert waiting.compute[-1].flops_per_second[-1] == pytest.approx(plain.compute[-1].flops_per_second[-1], rel=0.01)
    sent = [collective_seconds(item, "send_recv", 2, 1, 1e9) for item in (plain, waiting)]
    assert float(sent[1]) == pytest.approx(2 * float(sent[0]), rel=0.01)
    fused = profile_of(run, machine, "fused", ())
    rates = [{rate.kind: rate for rate in item.rates} for item in (plain, fused, without_chains(fused, machine))]
    assert rates[2]["elementwise"] == rates[0]["elementwise"] != rates[1]["elementwise"]
    assert rates[2]["reduction"] == rates[1]["reduction"]
    assert profile_of(run, machine, "fused", (FLASH2,)).kernels != profile_of(run, machine, "fused", ()).kernels
    after = profile_of(run, machine, "eager", (AFTER,)).interference
    assert after is not None
    assert after.compute_network == 1.0


def test_links_of_export_boards_are_half_as_fast_or_less():
    link = machine_of(replace(RUN, beside=("A800: NVLink of 400 GB/s",))).intra_node
    assert link is not None
    assert link.bytes_per_second == 200e9


def test_what_is_priced_with_more_memory_than_a_run_took_does_not_make_it_impossible():
    assert verdict_of(replace(RUN, stack="fused"), "does not fit") == "not certain"
    assert verdict_of(replace(RUN, stack="fused"), "fits") == "fits"
    assert verdict_of(RUN, "does not fit") == "does not fit"


def test_norms_are_many_operators_in_the_torch_that_had_no_fused_ones():
    sizes = tuple(sorted({**SMALL, "norm": "rmsnorm"}.items()))
    new, old = (spec_of(replace(RUN, torch=version), sizes).layers[0] for version in ("", "2.4"))
    assert old.forward_operators > new.forward_operators
    compiled = spec_of(replace(RUN, torch="2.4", stack="compiled"), sizes).layers[0]
    assert compiled.forward_operators == new.forward_operators


def test_evenly_shared_parameters_are_as_many_bytes_in_one_collective():
    sizes = tuple(sorted(SMALL.items()))
    spec = spec_of(RUN, sizes)
    even = evenly_shared(spec, 4)
    whole = sum(item.bytes for item in spec.parameters)
    assert whole <= sum(item.bytes for item in even.parameters) <= whole + 8 * len(even.parameters)
    profile = profile_of(RUN, machine_of(RUN), "eager", ())
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
    estimate = SimpleNamespace(worst=worst)
    found = Replay(seconds=seconds, own_seconds=seconds, estimate=estimate, verdict=verdict, stand_ins=())
    return sample_of(run, lambda: found)


def test_a_summary_has_errors_biases_wrong_verdicts_and_what_is_missing():
    samples = [_sample(number, 1.2) for number in range(20)]
    samples.append(_sample("big", 1.2, verdict="does not fit"))
    samples.append(_sample("small", 1.2, ran=False))
    samples.append(_sample("unsure", 1.2, verdict="not certain"))
    samples.append(_sample("peak", 1.2, memory_bytes=100, memory_metric="allocated"))
    samples.append(sample_of(RUN, lambda: replay(replace(RUN, beside=("float8",)), SMALL)))
    text = summary(samples)
    assert "median error 20.0%" in text
    assert "A100-80: bias +20.0%" in text
    assert "s: median error 20.0%, bias +20.0%, rank correlation 0.000" in text
    assert "ran, called impossible: 1 of 23 (big)" in text
    assert "ran out of memory, called fitting: 1 of 1 (small)" in text
    assert "not certain, as what is priced keeps more or less: 1 that ran, 0 that did not" in text
    assert "peaks allocated, of runs priced as what they are: 1 rows, median error 4.0%, within 5 %: 100%" in text
    assert "not said, float8: products in float8 have no price: 1 rows (a)" in text
