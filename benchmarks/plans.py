"""Plans of every kind that the runtime executes, for a number of devices."""

from collections.abc import Sequence

from lightning_mist import SearchSpace
from lightning_mist.plan import Checkpointing, Plan, ScheduleName, StageMesh, StagePlan, ZeroStage

SEARCHED = SearchSpace(zero_stages=(3, 2, 1, 0))
"""Every plan, named, so that plans are searched however little there is to gain: runs here are short."""


def data_parallel(
    layers: int, devices: int, rows: int, *, microbatches: int = 1, zero: int = 0, checkpointed: int = 0
) -> Plan:
    """One stage on all devices.

    Args:
        layers: Layers of the model.
        devices: Number of devices.
        rows: Rows of a batch on each device.
        microbatches: Parts that a batch is cut into.
        zero: ZeRO stage.
        checkpointed: Layers that are recomputed.
    """
    stage = StagePlan(
        layers=(0, layers),
        mesh=StageMesh(devices=tuple(range(devices)), data_parallel_degree=devices),
        microbatch_size=rows // microbatches,
        zero_stage=ZeroStage(zero),
        checkpointing=Checkpointing(layers=checkpointed),
    )
    return Plan(global_batch_size=rows * devices, num_microbatches=microbatches, stages=(stage,))


def pipeline(
    counts: Sequence[int],
    rows: int,
    *,
    microbatches: int,
    checkpointed: Sequence[int] = (),
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
) -> Plan:
    """One device per stage, or per ``chunks`` stages in turn; the last stage on rank 0.

    Args:
        counts: Layers of each stage.
        rows: Rows of a batch on each device.
        microbatches: Parts that the batches of all devices together are cut into.
        checkpointed: Layers of each stage that are recomputed; none by default.
        schedule: Name of the schedule.
        chunks: Stages of each device; more than one under ``"interleaved-1f1b"`` only.
    """
    stages, first, devices = [], 0, len(counts) // chunks
    for index, count in enumerate(counts):
        stages.append(
            StagePlan(
                layers=(first, first + count),
                mesh=StageMesh(devices=(devices - 1 - index % devices,)),
                microbatch_size=rows * devices // microbatches,
                checkpointing=Checkpointing(layers=checkpointed[index] if checkpointed else 0),
            )
        )
        first += count
    return Plan(
        global_batch_size=rows * devices, num_microbatches=microbatches, stages=tuple(stages), schedule=schedule
    )


def tensor_parallel(
    layers: int, devices: int, rows: int, *, microbatches: int = 1, sequence: bool = False, checkpointed: int = 0
) -> Plan:
    """One stage whose layers all devices share out.

    Args:
        layers: Layers of the model.
        devices: Number of devices.
        rows: Rows of a batch on each device.
        microbatches: Parts that the batches of all devices together are cut into, a multiple of their number.
        sequence: Whether what is not split otherwise is split along the sequence.
        checkpointed: Layers that are recomputed.
    """
    stage = StagePlan(
        layers=(0, layers),
        mesh=StageMesh(devices=tuple(range(devices)), tensor_parallel_degree=devices, sequence_parallel=sequence),
        microbatch_size=rows * devices // microbatches,
        checkpointing=Checkpointing(layers=checkpointed),
    )
    return Plan(global_batch_size=rows * devices, num_microbatches=microbatches, stages=(stage,))


def plans_for_two(layers: int, rows: int) -> dict[str, Plan]:
    """A dozen plans for two devices, by name; ``layers`` and ``rows`` are multiples of 8."""
    half, less = layers // 2, layers * 3 // 8
    return {
        "dp2": data_parallel(layers, 2, rows),
        "dp2 zero1": data_parallel(layers, 2, rows, zero=1),
        "dp2 G=4": data_parallel(layers, 2, rows, microbatches=4),
        "dp2 zero1 G=8": data_parallel(layers, 2, rows, microbatches=8, zero=1),
        "dp2 all recomputed": data_parallel(layers, 2, rows, checkpointed=layers),
        "dp2 zero1 half recomputed G=2": data_parallel(layers, 2, rows, microbatches=2, zero=1, checkpointed=half),
        "pp2 G=2": pipeline((half, half), rows, microbatches=2),
        "pp2 G=8": pipeline((half, half), rows, microbatches=8),
        "pp2 uneven G=4": pipeline((layers - less, less), rows, microbatches=4),
        "pp2 uneven the other way G=8": pipeline((less, layers - less), rows, microbatches=8),
        "pp2 first recomputed G=8": pipeline((half, half), rows, microbatches=8, checkpointed=(half, 0)),
        "pp2 all recomputed G=16": pipeline((half, half), rows, microbatches=16, checkpointed=(half, half)),
    }


def step_time_plans(layers: int, rows: int) -> dict[str, Plan]:
    """Plans of every kind for two devices, by name, to be timed; ``layers`` and ``rows`` are multiples of 8."""
    half, less, quarter = layers // 2, layers * 3 // 8, (layers // 4,) * 4
    plans = plans_for_two(layers, rows)
    for zero, count in ((1, 2), (2, 1), (2, 4), (3, 1), (3, 4)):
        plans[f"dp2 zero{zero} G={count}"] = data_parallel(layers, 2, rows, microbatches=count, zero=zero)
    plans["dp2 zero3 all recomputed G=2"] = data_parallel(layers, 2, rows, microbatches=2, zero=3, checkpointed=layers)
    plans["pp2 gpipe G=8"] = pipeline((half, half), rows, microbatches=8, schedule="gpipe")
    plans["pp2 zb-h1 G=4"] = pipeline((half, half), rows, microbatches=4, schedule="zb-h1")
    plans["pp2 zb-h1 uneven G=8"] = pipeline((layers - less, less), rows, microbatches=8, schedule="zb-h1")
    for count in (4, 8):
        plans[f"pp2 interleaved G={count}"] = pipeline(
            quarter, rows, microbatches=count, schedule="interleaved-1f1b", chunks=2
        )
    plans["tp2 G=2"] = tensor_parallel(layers, 2, rows, microbatches=2)
    plans["tp2 G=4 sequence"] = tensor_parallel(layers, 2, rows, microbatches=4, sequence=True)
    plans["tp2 G=4 all recomputed"] = tensor_parallel(layers, 2, rows, microbatches=4, checkpointed=layers)
    return plans
