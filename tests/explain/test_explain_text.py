import json
from dataclasses import replace

import pytest

from lightning_mist.explain.explain_text import explanation_data, explanation_sections, technique_line, what_if_line
from lightning_mist.explain.explanation import Explanation, Finding, OtherPlan, TechniqueValue, Version, WhatIf
from lightning_mist.plan import Predicted, PredictedStage, from_json
from tests.tuner.plans import pipeline

STEP = 0.5


def plan(seconds=STEP):
    stage = PredictedStage(
        steady_seconds=seconds, boundary_seconds=0.0, forward_seconds=seconds, backward_seconds=0.0, peak_bytes=2**20
    )
    made = pipeline({"layers": 2}, {"layers": 2})
    return replace(made, predicted=Predicted(step_seconds=seconds, stages=(stage, stage)))


def version(seconds, **changes):
    return Version(plan=plan(seconds), **changes)


NONE = Version(plan=None, reason="no plan fits. The least that any needs is 3 GiB")


def technique(off, best=None):
    return technique_line(
        TechniqueValue(
            name="recomputation", meaning="things are done twice", use="on stage 0", switched_off=off, best_without=best
        ),
        STEP,
    )


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (version(0.6), "Without it the plan takes 600 ms per step (+20.0%)."),
        (version(0.5), "Without it the plan takes as long, 500 ms per step."),
        (
            version(0.4, missing_bytes=3 * 2**30),
            "Without it the plan needs 3.0 GiB of memory more per device than there is; with that much it would take "
            "400 ms per step (-20.0%).",
        ),
        (NONE, "It cannot be switched off by itself (no plan fits)."),
    ],
)
def test_what_a_technique_buys_in_the_plan(off, said):
    assert technique(off) == f"recomputation (things are done twice): on stage 0. {said}"


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (None, ""),
        (version(0.55), " The best plan without it takes 550 ms per step (+10.0%)."),
        (version(0.55, proven=False), " The best plan that was found without it takes 550 ms per step (+10.0%)."),
        (NONE, " The search space has no plan without it that fits."),
    ],
)
def test_what_it_buys_against_the_best_plan_without_it(best, said):
    assert technique(version(0.6), best).endswith(f"600 ms per step (+20.0%).{said}")


@pytest.mark.parametrize(
    ("same", "best", "said"),
    [
        (version(0.5), version(0.5), "no gain."),
        (version(0.5), version(0.51), "no gain."),  # the plan at hand is there too
        (version(0.5), version(0.51, proven=False), "no gain was found."),
        (version(0.5), None, "no gain by this plan; others were not looked for."),
        (version(0.5), version(0.4), "400 ms per step (-20.0%), by another plan."),
        (
            version(0.5),
            version(0.4, proven=False),
            "400 ms per step (-20.0%), by another plan, the best that was found.",
        ),
        (version(0.4), version(0.4), "400 ms per step (-20.0%), without changing the plan."),
        (version(0.4), None, "400 ms per step (-20.0%) by this plan; a better one was not looked for."),
        (
            version(0.45),
            version(0.4),
            "400 ms per step (-20.0%) by another plan; this one would take 450 ms per step (-10.0%).",
        ),
        (None, version(0.25), "250 ms per step (-50.0%), by another plan."),
        (None, NONE, "no plan fits."),
        (None, None, "not looked for."),
        (version(0.3, missing_bytes=1), version(0.4), "400 ms per step (-20.0%), by another plan."),
    ],
)
def test_what_a_better_machine_buys(same, best, said):
    assert what_if_line(WhatIf(change="twice as much", same_plan=same, best=best), STEP) == f"twice as much: {said}"


def finding(binds, text):
    return Finding(stage=0, limit="memory", binds=binds, values=(("free_bytes", 1.0),), text=text)


def explanation():
    return Explanation(
        plan=plan(),
        limits=(2.0**21, 2.0**21),
        findings=(finding(True, "it is full"), finding(False, "it is not")),
        techniques=(TechniqueValue(name="a", meaning="b", use="c", switched_off=version(0.6)),),
        others=(OtherPlan(plan=plan(0.75), differences=("1 stage in place of 2 stages", "recomputes layers")),),
        what_ifs=(WhatIf(change="more", same_plan=None, best=version(0.25)),),
        left_out=("the rest",),
        unsearched=("this", "that"),
        seconds=1.5,
        more_seconds=8.5,
    )


def test_all_is_said_under_titles():
    assert explanation_sections(explanation()) == (
        ("what binds and what does not", ("it is full.", "it is not.")),
        ("what each technique buys", ("a (b): c. Without it the plan takes 600 ms per step (+20.0%).",)),
        (
            "the best plans found of other kinds",
            ("750 ms per step (+50.0%), peak 1.0 MiB: 1 stage in place of 2 stages, recomputes layers.",),
        ),
        ("what a better machine would buy", ("more: 250 ms per step (-50.0%), by another plan.",)),
        (
            "left out",
            (
                "in 1.5 s there was no time to search for this; that.",
                "--explain-seconds 10 gives about the time that this takes (explain_plan: seconds=10).",
                "the rest.",
            ),
        ),
    )


def test_there_is_no_empty_section():
    short = dict(explanation_sections(replace(explanation(), what_ifs=(), others=())))
    assert list(short) == ["what binds and what does not", "what each technique buys", "left out"]


def test_stages_that_wait_or_hide_share_a_sentence():
    def item(stage, limit, binds, **values):
        return Finding(stage=stage, limit=limit, binds=binds, values=tuple(values.items()), text=f"{limit} of {stage}")

    findings = (
        item(0, "pace", True, steady_seconds=0.3, slowest_seconds=0.3),
        item(0, "boundary", True, boundary_seconds=0.1),
        *(item(at, "pace", False, steady_seconds=0.3 - 0.1 * at, slowest_seconds=0.3) for at in (1, 2)),
        *(item(at, "boundary", False, boundary_seconds=0.2) for at in (1, 2, 3, 5)),
    )
    told = dict(explanation_sections(replace(explanation(), findings=findings)))["what binds and what does not"]
    assert told == (
        "pace of 0.",
        "boundary of 0.",
        "Waiting for the slowest stage, per microbatch: stage 1 100 ms; stage 2 200 ms.",
        "Reducing gradients and updating, hidden behind other stages: stages 1 to 3 and 5 200 ms.",
    )


def test_other_programs_get_numbers_plans_and_sentences():
    data = json.loads(json.dumps(explanation_data(explanation())))
    assert data["step_seconds"] == STEP
    assert data["limit_bytes"] == [2**21, 2**21]
    assert data["findings"][0] == {
        "stage": 0,
        "limit": "memory",
        "binds": True,
        "values": {"free_bytes": 1.0},
        "text": "it is full",
    }
    (technique,), (other,), (what_if,) = data["techniques"], data["others"], data["what_ifs"]
    assert (technique["switched_off"]["step_seconds"], technique["best_without"]) == (0.6, None)
    assert from_json(json.dumps(other["plan"])) == plan(0.75)
    assert other["step_seconds"] == 0.75
    assert what_if["best"]["step_seconds"] == 0.25
    assert what_if["text"] == "more: 250 ms per step (-50.0%), by another plan."
    assert data["left_out"] == ["the rest"]
    assert data["unsearched"] == ["this", "that"]
    assert data["more_seconds"] == 8.5
