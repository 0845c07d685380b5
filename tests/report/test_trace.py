import dataclasses
import json

from lightning_mist.cli.show_command import trace_text
from lightning_mist.schedule import simulate_plan
from tests.report.networks import predicted


def test_bytes_are_beside_what_runs():
    plan = predicted(2, 4)
    simulation = simulate_plan(plan)
    events = json.loads(trace_text(plan, simulation))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, simulation.spans))
    for group, stage in enumerate(plan.predicted.stages):
        levels = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == group]
        assert round(max(sum(level.values()) for level in levels)) == stage.peak_bytes


def test_a_plan_that_does_not_say_what_memory_is_made_of_has_a_trace_without():
    plan = predicted(2, 4)
    stages = tuple(dataclasses.replace(stage, needs=()) for stage in plan.predicted.stages)
    bare = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, stages=stages))
    assert '"C"' not in trace_text(bare, simulate_plan(bare))
