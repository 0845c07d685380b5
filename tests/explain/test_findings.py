from dataclasses import replace

import pytest

from lightning_mist.cost import StageCostModel, predict_with, stage_memory
from lightning_mist.explain.explanation import Version, closed_form_of
from lightning_mist.explain.findings import batch_finding, findings_of
from lightning_mist.plan import Checkpointing
from lightning_mist.units import format_bytes, format_seconds
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

NETWORK = spec(6, measured=True)


def model_of(network=NETWORK, devices=2, kind="cpu", **changes):
    return StageCostModel(network, replace(profile(), **changes), cluster(devices, kind=kind))


def predicted(model, plan):
    return replace(plan, predicted=predict_with(model, plan))


def found(model, plan, limit, name, stage=0, **options):
    """One finding of one stage."""
    limits = (limit,) * plan.num_stages
    items = [
        item
        for item in findings_of(model, predicted(model, plan), limits=limits, **options)
        if (item.limit, item.stage) == (name, stage)
    ]
    return items[0]


def recomputing(plan, layers, at=0):
    stages = list(plan.stages)
    stages[at] = replace(stages[at], checkpointing=Checkpointing(layers=layers))
    return replace(plan, stages=tuple(stages))


PLAN = pipeline({"layers": 3, "checkpointed": 2}, {"layers": 3}, microbatches=4, rows=4)


def test_memory_holds_a_stage_back_if_one_layer_fewer_recomputed_does_not_fit():
    model = model_of()
    peak, more = (stage_memory(NETWORK, plan)[0].peak_bytes for plan in (PLAN, recomputing(PLAN, 1)))
    item = found(model, PLAN, float(more - 1), "memory")
    assert item.binds
    assert item.value("peak_bytes") == peak
    assert item.value("free_bytes") == more - 1 - peak
    assert item.value("missing_bytes") == 1
    steady = [predict_with(model, plan).stages[0].steady_seconds for plan in (PLAN, recomputing(PLAN, 1))]
    assert item.value("gain_seconds") == pytest.approx(4 * (steady[0] - steady[1]))
    assert f"needs {format_bytes(peak)} of the {format_bytes(more - 1)}" in item.text
    assert "with one layer fewer recomputed" in item.text
    assert f"its devices would work {format_seconds(item.value('gain_seconds'))} less per step" in item.text


def test_what_memory_costs_the_step_is_told_from_what_it_costs_one_stage():
    """The first stage recomputes and sets the pace; a second one that recomputes beside it only waits less."""
    model, plan = model_of(), recomputing(PLAN, 1, at=1)
    steps = {
        at: closed_form_of(predicted(model, recomputing(plan, count - 1, at=at))) for at, count in ((0, 2), (1, 1))
    }
    now = closed_form_of(predicted(model, plan))
    first, second = (found(model, plan, 1.0, "memory", stage=at) for at in (0, 1))
    assert [item.value("step_gain_seconds") for item in (first, second)] == pytest.approx(
        [now - steps[0], now - steps[1]]
    )
    assert f"and the step would be {format_seconds(now - steps[0])} shorter" in first.text
    assert first.value("step_gain_seconds") > second.value("step_gain_seconds") >= 0


def test_a_stage_that_memory_slows_down_may_not_slow_down_the_step():
    """A stage with as many layers recomputed as leave it faster than its neighbour waits less without them."""
    plan = pipeline({"layers": 5}, {"layers": 1, "checkpointed": 1}, microbatches=64, rows=32)
    item = found(model_of(), plan, 1.0, "memory", stage=1)
    assert item.binds
    assert item.value("step_gain_seconds") < item.value("gain_seconds") / 50
    assert "(the step would hardly be shorter, as it waits for other stages)" in item.text


def test_memory_does_not_hold_a_stage_back_whose_faster_version_fits():
    more = stage_memory(NETWORK, recomputing(PLAN, 1))[0].peak_bytes
    item = found(model_of(), PLAN, float(more), "memory")
    assert not item.binds
    assert "with one layer fewer recomputed it would fit too" in item.text


def test_nothing_saved_is_nothing_held_back():
    item = found(model_of(), PLAN, 1e6, "memory", stage=1)
    assert not item.binds
    assert item.text.endswith("No technique that saves memory slows it down")
    assert f"{format_bytes(item.value('free_bytes'))} are free" in item.text


def test_the_moment_and_the_largest_term_of_the_peak_are_named():
    memory = stage_memory(NETWORK, PLAN)[0]
    name, size = max(memory.terms, key=lambda item: item[1])
    item = found(model_of(), PLAN, 1e6, "memory")
    assert item.value(name.replace("_bytes", "_at_peak_bytes")) == size
    assert f"{format_bytes(size)}), at its peak in its {memory.phase}" in item.text


def test_chunks_of_one_group_are_judged_together():
    chunks = [{"layers": 1, "checkpointed": 1}] * 6
    plan = pipeline(*chunks, groups=2, schedule="interleaved-1f1b", microbatches=4, rows=16)
    peak, more = (stage_memory(NETWORK, item)[0].peak_bytes for item in (plan, recomputing(plan, 0)))
    assert more > peak
    item = found(model_of(), plan, float(more - 1), "memory")
    assert item.binds
    assert item.text.startswith("Stages 0, 2 and 4 need")
    stages = predict_with(model_of(), plan).stages
    pace = found(model_of(), plan, 1e9, "pace")
    assert pace.value("steady_seconds") == pytest.approx(sum(stages[at].steady_seconds for at in (0, 2, 4)))


def test_chunks_of_one_group_share_less_out_together():
    chunks = [{"layers": 1, "data": 2, "zero": 1}] * 6
    plan = pipeline(*chunks, groups=2, schedule="interleaved-1f1b", microbatches=4, rows=4)
    item = found(model_of(devices=4), plan, float(stage_memory(NETWORK, plan)[0].peak_bytes), "memory")
    assert item.text.startswith("Stages 0, 2 and 4 need")


def test_the_slowest_stage_sets_the_pace_and_others_wait():
    model = model_of()
    first, second = (stage.steady_seconds for stage in predict_with(model, PLAN).stages)
    slow, fast = (0, 1) if first > second else (1, 0)
    item = found(model, PLAN, 1e9, "pace", stage=slow)
    assert item.binds
    assert item.value("steady_seconds") - item.value("next_seconds") == pytest.approx(abs(first - second))
    assert "sets the pace" in item.text
    stage = predict_with(model, PLAN).stages[slow]
    rest = stage.steady_seconds - stage.forward_seconds - stage.backward_seconds
    assert (
        f"{format_seconds(stage.steady_seconds)} per microbatch (forward {format_seconds(stage.forward_seconds)}, "
        f"backward {format_seconds(stage.backward_seconds)}, transfers and overhead {format_seconds(rest)})"
    ) in item.text
    other = found(model, PLAN, 1e9, "pace", stage=fast)
    assert not other.binds
    assert f"{format_seconds(abs(first - second))} less than stage {slow}, for which it waits" in other.text


def test_a_single_stage_waits_for_nobody():
    plan = pipeline({"layers": 6, "data": 2}, microbatches=2, rows=2)
    model = model_of()
    items = findings_of(model, predicted(model, plan), limits=(1e9,))
    assert [item.limit for item in items] == ["memory", "boundary"]
    assert items[1].value("exposed_seconds") == predict_with(model, plan).stages[0].boundary_seconds


def test_what_is_done_once_per_step_shows_as_far_as_earlier_stages_do_not_hide_it():
    model = model_of()
    stages = predict_with(model, PLAN).stages
    shown = [stages[0].boundary_seconds, max(0.0, stages[1].boundary_seconds - stages[0].steady_seconds)]
    items = [found(model, PLAN, 1e9, "boundary", stage=at) for at in range(2)]
    assert [item.value("exposed_seconds") for item in items] == pytest.approx(shown)
    assert [item.binds for item in items] == [True, False]
    assert items[1].text.endswith("it hides behind the stages before it")


def test_of_other_schedules_nothing_is_said_that_the_closed_form_does_not_know():
    plan = replace(PLAN, schedule="zb-h1")
    model = model_of()
    limits = {item.limit for item in findings_of(model, predicted(model, plan), limits=(1e9, 1e9))}
    assert limits == {"memory", "pace"}


OFFLOADING = pipeline({"layers": 6, "offload": {"activations": 0.5}}, microbatches=2, rows=4)


def on_device(**changes):
    rates = {"host_to_device_bytes_per_second": 1e6, "device_to_host_bytes_per_second": 1e6}
    return model_of(devices=1, kind="cuda", **{**rates, **changes})


def test_host_memory_is_told_and_held_against_its_limit():
    model, held = on_device(), stage_memory(NETWORK, OFFLOADING)[0].host_bytes
    free = found(model, OFFLOADING, 1e9, "host memory")
    assert (free.binds, free.value("host_bytes")) == (False, held)
    assert "no limit is known" in free.text
    assert found(model, OFFLOADING, 1e9, "host memory", host_limits=(held + 1.0,)).binds
    assert not found(model, OFFLOADING, 1e9, "host memory", host_limits=(10.0 * held,)).binds


def test_waiting_for_copies_is_what_was_predicted():
    model = on_device()
    spent = dict(predict_with(model, OFFLOADING).stages[0].spent)["copies_seconds"]
    item = found(model, OFFLOADING, 1e9, "host link")
    assert item.binds
    assert item.value("copies_seconds") == spent > 0
    assert "one alone" not in item.text
    assert (
        "(one alone: 1 MB/s)" in found(on_device(host_bytes_per_second_per_node=5e5), OFFLOADING, 1e9, "host link").text
    )


def test_less_offload_that_does_not_fit_holds_back():
    model = on_device()
    less = replace(OFFLOADING.stages[0], offload=replace(OFFLOADING.stages[0].offload, activations=0.25))
    need = stage_memory(NETWORK, replace(OFFLOADING, stages=(less,)))[0].peak_bytes
    item = found(model, OFFLOADING, float(need - 1), "memory")
    assert item.binds
    assert "with 25% of its activations in host memory in place of 50%" in item.text


def test_other_numbers_of_microbatches_say_what_they_take_and_lack():
    model = model_of()
    plan = predicted(model, PLAN)
    step = plan.predicted.step_seconds
    faster = replace(plan, predicted=replace(plan.predicted, step_seconds=step / 2))
    slower = replace(plan, predicted=replace(plan.predicted, step_seconds=step * 2))
    lacking = Version(plan=faster, missing_bytes=3 * 2**20)
    item = batch_finding(plan, [(2, lacking), (8, Version(plan=slower))])
    assert item.binds
    assert "4 microbatches of 2 rows per data-parallel device" in item.text
    assert (
        f"2 would take {format_seconds(step / 2)} per step (-50.0%), but would need 3.0 MiB of memory more" in item.text
    )
    assert f"8 would take {format_seconds(2 * step)} per step (+100.0%)" in item.text
    assert item.value("missing_with_2_bytes") == 3 * 2**20
    assert not batch_finding(plan, [(8, Version(plan=slower))]).binds
    assert batch_finding(plan, []).text.endswith("on these stages no other number is possible")
    assert "8 cannot be: too many" in batch_finding(plan, [(8, Version(plan=None, reason="too many"))]).text


def test_a_ratio_that_moves_nothing_of_a_unit_is_told():
    model, offload = on_device(), replace(OFFLOADING.stages[0].offload, optimizer=0.25)
    plan = replace(OFFLOADING, stages=(replace(OFFLOADING.stages[0], offload=offload),))
    texts = [item.text for item in findings_of(model, predicted(model, plan), limits=(1e9,))]
    assert [text for text in texts if "offload.optimizer" in text] == [
        "The only stage: offload.optimizer = 0.25 moves nothing of the head and the tail: whole parameters move, and "
        "each there is a larger share of its unit"
    ]
