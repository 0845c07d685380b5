"""From pipelines to the plan: clock, other schedules, layouts of ranks, the simplest of equals."""

from lightning_mist.tuner.select.equal_stages import (
    fastest_with_context,
    known_contexts,
)
from lightning_mist.tuner.select.schedule_variants import clocked
from lightning_mist.tuner.select.selection import (
    ALIKE,
    CLOSED_FORM_AND_CLOCK,
    LEAST_SHARE,
    Alternative,
    Status,
    TuneResult,
    TuneStats,
    choose,
    make_plan,
    status_of,
)
