from dataclasses import replace

from lightning_mist.explain.explanation import Finding, TechniqueValue, Version
from lightning_mist.explain.short_reasons import main_reasons
from tests.explain.test_explain_text import STEP, explanation, plan, version


def technique(name, switched_off):
    return TechniqueValue(name=name, meaning="m", use="u", switched_off=switched_off)


def lacking(size):
    return Version(plan=plan(STEP), missing_bytes=size)


def limit(kind, text, **values):
    return Finding(stage=0, limit=kind, binds=True, values=tuple(values.items()), text=text)


def made(techniques=(), findings=()):
    return replace(explanation(), techniques=tuple(techniques), findings=tuple(findings))


PACE = limit("pace", "Stage 0 takes 1 s (forward 0.5 s): it sets the pace; the next takes less. And so on")


def test_techniques_that_buy_most_come_first_and_then_what_binds():
    techniques = [
        technique("idle", version(STEP)),
        technique("fast", version(1.2 * STEP)),
        technique("small", lacking(2**20)),
        technique("large", lacking(2**30)),
    ]
    assert main_reasons(made(techniques, [PACE])) == (
        "large: without, 1.0 GiB of memory more per device would be needed than there is",
        "small: without, 1.0 MiB of memory more per device would be needed than there is",
        "Stage 0 takes 1 s: it sets the pace",
    )
    assert main_reasons(made(techniques[:2], [PACE])) == (
        "fast: without, a step takes 600 ms (+20.0%)",
        "Stage 0 takes 1 s: it sets the pace",
    )
    assert len(main_reasons(made(techniques))) == 3


def test_memory_is_told_before_the_pace_if_the_step_gains_by_it():
    felt = limit("memory", "Stage 0 is full", gain_seconds=STEP / 4, step_gain_seconds=STEP / 4)
    hardly = limit("memory", "Stage 0 is full", gain_seconds=STEP / 4, step_gain_seconds=0.0)
    free = replace(felt, binds=False)
    assert main_reasons(made(findings=[PACE, felt])) == ("Stage 0 is full", "Stage 0 takes 1 s: it sets the pace")
    assert main_reasons(made(findings=[PACE, hardly, free])) == ("Stage 0 takes 1 s: it sets the pace",)


def test_stages_that_say_the_same_say_it_once():
    assert main_reasons(made(findings=[PACE, PACE])) == ("Stage 0 takes 1 s: it sets the pace",)
