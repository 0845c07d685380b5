import pytest

from lightning_mist.explain.explain_text import told_together
from lightning_mist.explain.explanation import Finding
from tests.tuner.plans import pipeline

PLAN = pipeline(*[{"layers": 1}] * 12)


def finding(stage, text, limit="memory"):
    return Finding(stage=stage, limit=limit, binds=True, values=(), text=text)


def needs(stage, size, phase="backward", missing="500.0 MiB"):
    return finding(stage, f"Stage {stage} needs {size} of the 18.0 GiB, in its {phase}, but {missing} more")


def test_stages_that_say_the_same_are_told_as_one():
    found = told_together(PLAN, [needs(1, "16.9 GiB"), needs(2, "17.0 GiB", missing="1.2 GiB"), needs(4, "16.8 GiB")])
    assert found == (
        "Each of stages 1, 2 and 4 needs 16.8 to 17.0 GiB of the 18.0 GiB, in its backward, but 500.0 MiB to 1.2 GiB "
        "more",
    )


@pytest.mark.parametrize(
    "other",
    [
        needs(2, "17.0 GiB", phase="forward"),
        needs(2, "15.0 GiB"),
        finding(2, "Stage 2 needs 16.9 GiB of the 18.0 GiB, in its backward, but 500.0 MiB more", limit="host memory"),
    ],
)
def test_what_differs_stays_apart_and_in_order(other):
    items = [needs(1, "16.9 GiB"), other]
    assert told_together(PLAN, items) == tuple(item.text for item in items)


def test_settings_are_no_measured_numbers():
    """25 % of a kind of state in host memory is not 50 %, and stage 7 is not stage 8; shares of time may differ."""
    settings = [finding(stage, f"Stage {stage} with {share}% of its state") for stage, share in ((1, 25), (2, 50))]
    assert len(told_together(PLAN, settings)) == 2
    waits = [finding(stage, f"Stage {stage} waits for stage {slowest}") for stage, slowest in ((1, 7), (2, 8))]
    assert len(told_together(PLAN, waits)) == 2
    shares = [finding(stage, f"Stage {stage} takes {share}% less") for stage, share in ((1, 2.5), (2, 2.6))]
    assert told_together(PLAN, shares) == ("Each of stages 1 and 2 takes 2.5 to 2.6% less",)


def test_stages_whose_numbers_begin_alike_are_told_apart():
    items = [finding(1, "Stage 1 needs 1.0 GiB"), finding(11, "Stage 11 needs 1.0 GiB")]
    assert told_together(PLAN, items) == ("Each of stages 1 and 11 needs 1.0 GiB",)


def test_chunks_are_told_by_their_group_of_devices():
    chunks = pipeline(*[{"layers": 1}] * 6, groups=3, schedule="interleaved-1f1b", microbatches=3)
    items = [finding(group, f"Stages {group} and {group + 3} need 1.{group} GiB") for group in range(2)]
    assert told_together(chunks, items) == ("The stages of each of the groups of devices 0 and 1 need 1.0 to 1.1 GiB",)


def test_what_is_about_the_whole_plan_stays_as_it_is():
    items = [finding(None, "Every device loads 4 rows"), finding(None, "Every device loads 4 rows")]
    assert told_together(PLAN, items) == ("Every device loads 4 rows",) * 2
