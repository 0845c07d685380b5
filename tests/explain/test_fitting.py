from dataclasses import replace

import pytest

from benchmarks.planner.apart import spec_of
from lightning_mist.estimate import MemoryEstimate
from lightning_mist.estimate.device_need import Interval
from lightning_mist.explain import fitting
from lightning_mist.explain.fitting import estimate_of, plan_that_fits
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.infeasible import UndecidedError
from tests.specs import cluster, profile, spec

NETWORK = spec(4, measured=True)


def planned(memory=10**7):
    planner = Planner(NETWORK, cluster(2, kind="cuda", memory=memory), profile=profile())
    search = SearchSpace(schedules=("1f1b",), offload=())
    asked = {"global_batch_size": 8, "memory_limit": None, "host_memory_limit": None, "search": search}
    return planner, planner.tune(**asked), asked


def needing(more, spread=1.0):
    """Estimates that find so many times the bytes that the search does, in 95 of 100 cases ``spread`` times that."""

    def estimate(spec, cluster, found, limit):
        known = estimate_of(spec, cluster, found, limit)
        peaks = [int(more * stage.peak_bytes) for stage in found.predicted.stages]
        stages = tuple(
            replace(stage, device_total=Interval(p50=peak, p95=int(spread * peak)))
            for stage, peak in zip(known.stages, peaks, strict=True)
        )
        return replace(known, stages=stages)

    return estimate


def test_a_plan_that_fits_stays(monkeypatch):
    planner, result, asked = planned()
    monkeypatch.setattr(fitting, "estimate_of", needing(1.0))
    found = plan_that_fits(planner, result, asked, print)
    assert found.result is result
    assert (found.asked, found.notes) == (asked, ())


def test_a_plan_whose_estimate_does_not_fit_is_made_again_with_less(monkeypatch, capsys):
    planner, _, asked = planned()
    least = max(stage.peak_bytes for stage in planner.tune(**asked).predicted.stages)
    planner, result, asked = planned(memory=int(least / 0.8) + 1)  # the search leaves nothing free
    monkeypatch.setattr(fitting, "estimate_of", needing(1.3))
    found = plan_that_fits(planner, result, asked, print)
    assert found.estimate.verdict == "fits"
    assert found.asked["memory_limit"] < planner.cluster.device.memory_bytes
    peaks = [max(stage.peak_bytes for stage in item.predicted.stages) for item in (result, found.result)]
    assert peaks[1] < peaks[0]
    assert "does not fit in 100 of 100 cases: searching with less memory" in capsys.readouterr().out
    # What surely does not fit is not offered.
    assert found.notes == ()


def test_what_fits_is_recommended_and_what_a_faster_plan_risks_is_said(monkeypatch):
    planner, _, asked = planned()
    least = max(stage.peak_bytes for stage in planner.tune(**asked).predicted.stages)
    planner, result, asked = planned(memory=int(least / 0.8) + 1)
    monkeypatch.setattr(fitting, "estimate_of", needing(1.2, spread=1.1))
    monkeypatch.setattr(fitting, "WORTH_PAYING", 0.0)  # What fits may take as long as it wants.
    found = plan_that_fits(planner, result, asked, print)
    assert found.result is not result
    assert found.estimate.verdict == "fits"
    (note,) = found.notes
    gain = 1 - result.predicted.step_seconds / found.result.predicted.step_seconds
    assert note.endswith(f"({gain:.1%} less)")
    assert 5 < float(note.split("a risk of ")[1].split(" in 100")[0]) < 50


@pytest.mark.parametrize("most", [0.0, 10.0])
def test_where_none_fits_to_be_surer_may_cost_so_much(monkeypatch, most):
    planner, _, asked = planned()
    least = max(stage.peak_bytes for stage in planner.tune(**asked).predicted.stages)
    planner, result, asked = planned(memory=int(least / 0.8) + 1)
    monkeypatch.setattr(fitting, "estimate_of", needing(1.2, spread=1.1))
    monkeypatch.setattr(fitting, "WORTH_PAYING", most)
    monkeypatch.setattr(MemoryEstimate, "device_verdict", property(lambda self: "tight"))
    found = plan_that_fits(planner, result, asked, print)
    assert (found.result is not result) == (most > 0)
    (note,) = found.notes
    assert note.endswith("% less)" if most else "% more)")


def test_where_nothing_fits_by_its_estimate_the_first_plan_stays(monkeypatch):
    planner, result, asked = planned()
    monkeypatch.setattr(fitting, "estimate_of", needing(1000.0))
    found = plan_that_fits(planner, result, asked, print)
    assert found.result is result
    assert found.estimate.verdict == "does not fit"
    assert found.notes == ("no plan fits in 95 of 100 cases by its estimate",)


def test_where_time_is_up_it_is_not_said_that_nothing_fits(monkeypatch):
    planner, result, asked = planned()
    monkeypatch.setattr(fitting, "estimate_of", needing(1000.0))

    def tune(self, **asks):
        raise UndecidedError("no plan was found in solver_seconds=1")

    monkeypatch.setattr(Planner, "tune", tune)
    found = plan_that_fits(planner, result, asked, print)
    assert found.result is result
    assert found.notes == ("no plan was found in time that fits in 95 of 100 cases by its estimate",)


@pytest.mark.parametrize("limit", [None, 5 * 10**6])
def test_the_limit_of_an_estimate(limit):
    planner, result, _ = planned()
    assert estimate_of(planner.spec, planner.cluster, result.plan, limit).memory_limit == (limit or 10**7)


def test_of_unlike_devices_those_have_less_on_which_a_plan_does_not_fit(monkeypatch):
    machine = parse_cluster("1x2xA100-80+1x2xA100-40")
    asked = {
        "global_batch_size": 16,
        "memory_limit": None,
        "host_memory_limit": None,
        "search": SearchSpace(num_stages=(2,), schedules=("1f1b",), offload=()),
    }
    network = spec_of(PRESETS["gpt3-7b"], "gpt3-7b", "1x4xA100-40", rows=4, sequence_length=2048)
    planner = Planner(network, machine)
    small = next(part for part in machine.parts if part.device.name == "A100-40").device.memory_bytes
    seen = []

    def estimate(spec, cluster, found, limit):
        """Says of the first plan that its stage on the smaller devices needs a little more than these have."""
        seen.append(found)
        known = estimate_of(spec, cluster, found, limit)
        (tight,) = [index for index, stage in enumerate(found.stages) if min(stage.devices) >= 2]
        need = Interval(p50=small - 1, p95=int(1.02 * small)) if len(seen) == 1 else Interval(p50=1, p95=2)
        stages = [
            replace(stage, device_total=need if index == tight else Interval(p50=1, p95=2))
            for index, stage in enumerate(known.stages)
        ]
        return replace(known, stages=tuple(stages))

    monkeypatch.setattr(fitting, "estimate_of", estimate)
    result = planner.tune(**asked)
    found = plan_that_fits(planner, result, asked, print)
    assert found.asked == asked
    first, second = ([stage.peak_bytes for stage in item.predicted.stages] for item in (result, found.result))
    assert second[1] <= first[1] / 1.02
    assert second[0] > first[1]  # what the larger devices have is used as before
