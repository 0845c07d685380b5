"""Plans of every kind that the runtime executes, for a number of devices."""

from collections.abc import Sequence

from lightning_mist.plan import Checkpointing, Plan, StageMesh, StagePlan, ZeroStage


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


def pipeline(counts: Sequence[int], rows: int, *, microbatches: int, checkpointed: Sequence[int] = ()) -> Plan:
    """One device per stage, the last stage on rank 0.

    Args:
        counts: Layers of each stage.
        rows: Rows of a batch on each device.
        microbatches: Parts that the batches of all devices together are cut into.
        checkpointed: Layers of each stage that are recomputed; none by default.
    """
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(
            StagePlan(
                layers=(first, first + count),
                mesh=StageMesh(devices=(len(counts) - 1 - index,)),
                microbatch_size=rows * len(counts) // microbatches,
                checkpointing=Checkpointing(layers=checkpointed[index] if checkpointed else 0),
            )
        )
        first += count
    return Plan(global_batch_size=rows * len(counts), num_microbatches=microbatches, stages=tuple(stages))


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
