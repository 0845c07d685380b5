"""Why this plan, and what others would choose."""

from lightning_mist.explain.baseline_plans import REST, WITH_AUTOCAST, baseline_notes, baselines_with
from lightning_mist.explain.comparison import ComparedPlan, compare_plans, faster_notes, faster_plan, with_faster
from lightning_mist.explain.explain_table import render_explanation, render_sections
from lightning_mist.explain.explain_text import Section, explanation_data, explanation_sections
from lightning_mist.explain.explanation import Explanation
from lightning_mist.explain.fitting import Fitting, estimate_of, plan_that_fits
from lightning_mist.explain.membership import outside
from lightning_mist.explain.plan_explanation import explain_plan
from lightning_mist.explain.short_reasons import main_reasons
