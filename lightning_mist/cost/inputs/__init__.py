"""What the cost model is asked about: candidates as arrays, where ranks lie, networks in numbers."""

from lightning_mist.cost.inputs.arrays import ArrayRecord, distinct, distinct_codes, distinct_rows, prefix_sums
from lightning_mist.cost.inputs.candidates import (
    OffloadCandidates,
    Placed,
    StageCandidates,
    StageSlot,
    placed_slots_of,
    slots_of,
)
from lightning_mist.cost.inputs.expressions import BoolArray, FloatArray, IntArray, compile_expressions
from lightning_mist.cost.inputs.placement import StageCrossing
from lightning_mist.cost.inputs.regions import (
    Collectives,
    ParameterTable,
    RegionCosts,
    RegionWork,
    StageRegions,
    compile_regions,
    covered,
    key_value_bytes,
    parameter_regions,
    regions_of,
    runs_between,
)
