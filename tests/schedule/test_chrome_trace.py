import json
from itertools import pairwise

from lightning_mist.schedule import Action, generate
from lightning_mist.schedule.chrome_trace import Span, to_chrome_trace
from lightning_mist.schedule.lowering import add_transfers
from lightning_mist.schedule.schedule_simulation import ActionSeconds, simulate


def test_events_carry_times_in_microseconds_and_lanes():
    spans = [Span(3, Action.parse("1F0"), 0.5, 0.75), Span(3, Action.parse("1SEND_F0"), 0.75, 1.0)]
    document = json.loads(to_chrome_trace(spans, names={3: "rank 3 (stage 1)"}))
    metadata = [event for event in document["traceEvents"] if event["ph"] == "M"]
    assert metadata[0] == {
        "name": "process_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "rank 3 (stage 1)"}
    }  # fmt: skip
    assert [event["args"]["name"] for event in metadata if event["name"] == "thread_name"] == [
        "compute",
        "receive",
        "send",
    ]
    assert [event for event in document["traceEvents"] if event["ph"] == "X"] == [
        {
            "name": "1F0", "cat": "forward", "ph": "X", "ts": 500000.0, "dur": 250000.0, "pid": 3, "tid": 0,
            "args": {"stage": 1, "microbatch": 0},
        },
        {
            "name": "1SEND_F0", "cat": "send_activation", "ph": "X", "ts": 750000.0, "dur": 250000.0, "pid": 3,
            "tid": 2, "args": {"stage": 1, "microbatch": 0},
        },
    ]  # fmt: skip


def test_every_action_of_a_simulated_run_is_in_its_trace_and_computations_do_not_overlap():
    schedule = add_transfers(generate(3, 4))
    result = simulate(schedule, [ActionSeconds(forward=1, backward=2)] * 3, activation_seconds=[1, 1])
    document = json.loads(to_chrome_trace(span for line in result.spans for span in line))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in events) == sorted(str(action) for line in schedule for action in line)
    for stage in range(3):
        lane = [event for event in events if event["pid"] == stage and event["tid"] == 0]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(lane))
