from dataclasses import replace

import pytest

from benchmarks.planner.apart import NOTHING_FITS, PRECISION, Question, Reply, Session, ask_apart, spec_of
from benchmarks.planner.search_times import CASES, MIXED, PRECISIONS, Case, questions_of, sample_of, spaces
from lightning_mist.cli.cluster_input import check_rates
from lightning_mist.cli.network import NetworkRequest, describe_network
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.tuner import SearchSpace
from tests.specs import spec
from tests.tiers import tiered


def test_a_planner_in_a_process_of_its_own_answers_every_question() -> None:
    session = ask_apart(
        spec(4), "1x2xL4", (Question(global_batch_size=8), Question(global_batch_size=16)), SearchSpace(max_stages=1)
    )
    first, second = session.replies
    assert {first.status, second.status} == {"optimal"}
    assert (first.stages, first.gap) == (1, 0.0)
    assert 0 < first.step_seconds < second.step_seconds
    assert 0 < session.before_bytes <= first.peak_bytes <= second.peak_bytes
    assert first.processor_seconds > 0


@pytest.mark.parametrize(("name", "capability"), [("1x4xL4", (8, 9)), ("1x8xH100", (9, 0))])
def test_networks_are_described_as_the_command_describes_them(name: str, capability: tuple[int, int]) -> None:
    devices = parse_cluster(name).world_size
    request = NetworkRequest(
        model="gpt3-1.3b",
        rows=2,
        seq_len=512,
        precision=PRECISION,
        optimizer="AdamW",
        degrees=tuple(2**power for power in range(4) if 2**power <= devices),
        device_kind="cuda",
        capability=capability,
    )
    found = spec_of(PRESETS["gpt3-1.3b"], "gpt3-1.3b", name, rows=2, sequence_length=512)
    assert {item.degree for item in found.splits} == {*request.degrees} - {1}
    assert found == replace(describe_network(request), notes=())


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wide was never traced in bf16-true for L4"):
        spec_of(replace(PRESETS["gpt3-1.3b"], heads=8), "wide", "1x2xL4", rows=2, sequence_length=512)


def test_cases_ask_for_whole_batches() -> None:
    for case in (*CASES, *MIXED):
        assert case.model in PRESETS
        for question in questions_of(case):
            assert question.global_batch_size % parse_cluster(case.cluster).world_size == 0


@pytest.mark.parametrize(
    "case",
    tiered([*CASES, *MIXED], [CASES[0], min(CASES, key=lambda case: len(case.precisions)), MIXED[0]]),
    ids=lambda case: f"{case.model} on {case.cluster}",
)
def test_cases_are_known_in_all_of_their_precisions(case: Case) -> None:
    for precision in map(PRECISIONS.__getitem__, case.precisions):
        check_rates(parse_cluster(case.cluster), None, precision.name)
        found = spec_of(
            PRESETS[case.model],
            case.model,
            case.cluster,
            rows=1,
            sequence_length=case.length,
            precision=precision.name,
            master_weights=precision.master_weights,
        )
        assert (found.precision, found.master_weights) == (precision.name, precision.master_weights)


def test_where_nothing_fits_is_said() -> None:
    asked = (Question(global_batch_size=8, memory_limit=600), Question(global_batch_size=8))
    first, second = ask_apart(spec(4), "1x2xL4", asked, SearchSpace(max_stages=1)).replies
    assert (first.status, first.stages, first.step_seconds) == (NOTHING_FITS, None, None)
    assert second.stages == 1


def test_every_space_is_searched_once_and_the_default_of_the_command_first() -> None:
    named = spaces()
    assert next(iter(named)) == "default"
    assert len(set(named.values())) == len(named)
    assert {item.offload for item in named.values()} >= {(), ("parameters", "gradients", "optimizer", "activations")}


def test_medians_of_seconds_and_the_most_memory_are_kept() -> None:
    def session(seconds: float, peak: int) -> Session:
        replies = tuple(
            Reply(
                seconds=seconds * (place + 1),
                processor_seconds=seconds / 2,
                peak_bytes=peak + place,
                status="optimal",
                gap=0.0,
                candidates=9,
                stages=2,
                step_seconds=1.0,
            )
            for place in range(4)
        )
        return Session(replies=replies, before_bytes=40)

    sample = sample_of(CASES[0], "32-true", "default", [session(3.0, 50), session(1.0, 70), session(2.0, 60)])
    asked = ("search", "less_memory", "more_memory", "half_batch", "processor")
    assert [sample[f"{name}_seconds"] for name in asked] == [2.0, 4.0, 6.0, 8.0, 1.0]
    assert [sample[f"{name}_bytes"] for name in ("rise", "process_peak", "replan_peak")] == [30, 70, 73]
