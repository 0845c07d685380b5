"""Which plan: the search for the fastest one that fits."""

from lightning_mist.tuner.alternatives import Alternative
from lightning_mist.tuner.baseline_plans import Baseline, baselines, baselines_with
from lightning_mist.tuner.comparison import ComparedPlan, compare_plans
from lightning_mist.tuner.explain import explain_plan
from lightning_mist.tuner.explain_render import render_explanation
from lightning_mist.tuner.explain_text import explanation_data, explanation_sections
from lightning_mist.tuner.explanation import Explanation
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.result import TuneResult, TuneStats
from lightning_mist.tuner.space import SearchSpace, degrees_to_try
from lightning_mist.tuner.tuning import tune

__all__ = [
    "Alternative",
    "Baseline",
    "ComparedPlan",
    "Explanation",
    "Planner",
    "SearchSpace",
    "TuneResult",
    "TuneStats",
    "baselines",
    "baselines_with",
    "compare_plans",
    "degrees_to_try",
    "explain_plan",
    "explanation_data",
    "explanation_sections",
    "render_explanation",
    "tune",
]
