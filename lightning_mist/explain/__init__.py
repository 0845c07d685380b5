"""Why this plan, and what others would choose."""

from lightning_mist.explain.baseline_plans import (
    REST,
    WITH_AUTOCAST,
    ComparedPlan,
    baseline_notes,
    baselines,
    compare_plans,
    faster_notes,
)
from lightning_mist.explain.explain_text import (
    explanation_data,
    explanation_sections,
    render_explanation,
    render_sections,
)
from lightning_mist.explain.explanation import Explanation
from lightning_mist.explain.fitting import estimate_of, plan_that_fits
from lightning_mist.explain.plan_explanation import explain_plan, main_reasons
