"""Cutting a batch so that the parts train as the whole does: proved from what the step computes, guarded in flight."""

from lightning_mist.runtime.cutting.follow import Result, alike, best_way, leaves_of_result, together
from lightning_mist.runtime.cutting.mode import WAY_OUT, CutMode, check_counts, copied, cutting
from lightning_mist.runtime.cutting.proof import prove
from lightning_mist.runtime.cutting.rules import CutRules, ResultKey, Way, is_close
from lightning_mist.runtime.cutting.tape import UncuttableError, Values
