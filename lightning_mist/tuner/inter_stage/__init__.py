"""The best pipeline of frontiers: exact dynamic program, flow program, HiGHS."""

from lightning_mist.tuner.inter_stage.exact_solver import least_peak, solve, solve_each, solve_family
from lightning_mist.tuner.inter_stage.flow_program import check, matching
from lightning_mist.tuner.inter_stage.problem import (
    PRECISION,
    Answer,
    Family,
    Incumbent,
    InterStageProblem,
    Pipeline,
    PipelineGroup,
    StagePlace,
    heads_of,
    tails_of,
)
from lightning_mist.tuner.inter_stage.suffix_dp import Suffixes, SuffixWalk
