from benchmarks.planner.apart import Question, Reply, Session, ask_apart, spec_of
from benchmarks.planner.search_times import CASES, sample_of
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.tuner import SearchSpace
from tests.specs import spec


def test_a_planner_in_a_process_of_its_own_answers_every_question() -> None:
    session = ask_apart(
        spec(4), "1x2xL4", (Question(global_batch_size=8), Question(global_batch_size=16)), SearchSpace(max_stages=1)
    )
    first, second = session.replies
    assert {first.status, second.status} == {"optimal"}
    assert (first.stages, first.gap) == (1, 0.0)
    assert 0 < first.step_seconds < second.step_seconds
    assert 0 <= session.rise_bytes < session.peak_bytes


def test_a_network_is_described_by_its_sizes_with_all_degrees_of_the_cluster() -> None:
    found = spec_of(PRESETS["gpt3-1.3b"], "small", "1x4xL4", rows=2, sequence_length=128)
    assert found.num_layers == 24
    assert {item.degree for item in found.splits} == {2, 4}


def test_cases_ask_for_whole_batches() -> None:
    for case in CASES:
        assert case.model in PRESETS
        assert case.batch % parse_cluster(case.cluster).world_size == 0


def test_medians_of_seconds_and_the_most_memory_are_kept() -> None:
    def session(seconds: float, peak: int) -> Session:
        replies = tuple(
            Reply(seconds=seconds * (place + 1), status="optimal", gap=0.0, candidates=9, stages=2, step_seconds=1.0)
            for place in range(3)
        )
        return Session(replies=replies, rise_bytes=peak - 10, peak_bytes=peak)

    sample = sample_of(CASES[0], [session(3.0, 50), session(1.0, 70), session(2.0, 60)])
    assert [sample[f"{name}_seconds"] for name in ("search", "other_memory", "other_batch")] == [2.0, 4.0, 6.0]
    assert (sample["rise_bytes"], sample["process_peak_bytes"]) == (60, 70)
