"""What the allocator takes for stages whose allocations are known, beside the sum of their tensors' bytes.

Of plans that offload only the sum is known. How much more than that a device needs is taken from plans of which both
are: :data:`lightning_mist.estimate.device_need.SPREADS` has the quantiles of this benchmark's record. The least with
which the allocations run, giving all free memory back in between, is hardly less than what is taken without a limit.

    python -m benchmarks.accuracy.summed_needs
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.record import RECORDS, Sample, make_record, write_record
from lightning_mist.estimate.allocator import least_capacity, simulate_allocator
from lightning_mist.estimate.device_need import workspaces
from lightning_mist.estimate.replay import replay_group
from lightning_mist.estimate.stage_estimates import Estimator, rank_overheads
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import KNOWN_OPTIMIZERS, LanguageModelShape, preset_spec
from lightning_mist.plan import Plan
from lightning_mist.plan.grid import plan_of

CLUSTER = parse_cluster("1x4xA100-80")
LENGTHS = (512, 2048)
SHAPES = {
    "gpt": LanguageModelShape(hidden=1024, ffn=4096, layers=8, heads=16, vocabulary=50304),
    "wide gpt": LanguageModelShape(hidden=4096, ffn=16384, layers=8, heads=32, vocabulary=50304),
    "llama": LanguageModelShape(
        hidden=2048, ffn=5504, layers=8, heads=16, vocabulary=32000, feed_forward="swiglu", norm="rmsnorm",
        rotary_fraction=1.0, key_value_heads=16,
    ),
}  # fmt: skip


def plans() -> Iterator[Plan]:
    """Pipelines and data parallelism on four devices, sharded or not, recomputed or not."""
    for stages, zero, checkpointed, rows in product((1, 2, 4), (0, 1, 3), (0, "all"), (1, 2)):
        count = 2 * stages
        yield plan_of(
            8,
            world_size=4,
            global_batch_size=rows * count * (4 // stages),
            pipeline_stages=stages,
            num_microbatches=count,
            zero_stage=zero if stages < 4 else 0,
            checkpointed_layers=checkpointed,
        )


def samples_of(name: str, precision: str, length: int) -> Iterator[Sample]:
    """The first and the last stage of every plan of a network."""
    spec = preset_spec(
        SHAPES[name],
        name=name,
        precision=precision,
        rows=2,
        length=length,
        degrees=(1,),
        optimizer=KNOWN_OPTIMIZERS["AdamW"],
    )
    assert spec is not None
    estimator = Estimator(spec, CLUSTER, CLUSTER.device.memory_bytes)
    for plan in dict.fromkeys(plans()):
        sums = estimator.stages(plan, replay="none")
        for group in sorted({0, plan.num_groups - 1}):
            replay = replay_group(spec, plan, group)
            overheads = rank_overheads(CLUSTER, plan, spec.module_map, replay.rank)
            events = (*workspaces(overheads.workspace_bytes), *replay.memory_events())
            stage = plan.stages[group]
            summed = sums[group].allocated.p50
            least, unlimited = least_capacity(events), simulate_allocator(events)
            yield {
                "model": name,
                "precision": precision,
                "tokens": length,
                "stages": plan.num_stages,
                "stage": group,
                "zero": stage.zero_stage,
                "checkpointed": stage.checkpointing.layers,
                "rows": stage.microbatch_size,
                "summed_bytes": summed,
                "tensor_bytes": unlimited.peak_allocated,
                "least_bytes": least,
                "unlimited_bytes": unlimited.peak_reserved,
                "least_over_summed": least / summed,
                "unlimited_over_summed": unlimited.peak_reserved / summed,
            }


def main() -> None:
    """Replay all, print the quantiles, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    asked = product(SHAPES, ("bf16-true", "bf16-mixed"), LENGTHS)
    samples = [row for name, precision, length in asked for row in samples_of(name, precision, length)]
    lines = []
    for key in ("least_over_summed", "unlimited_over_summed"):
        middle, high = np.quantile([row[key] for row in samples], [0.5, 0.95])
        lines.append(f"{key.replace('_', ' ')}: {middle:.3f} in the middle, 95 of 100 at most {high:.3f}")
    print(*lines, sep="\n")
    notes = f"Stages of 8 layers on {CLUSTER.device.name}, 512 or 2048 tokens per row, AdamW. {'. '.join(lines)}."
    print(write_record(make_record("summed-needs", samples, notes=notes), options.records))


if __name__ == "__main__":
    main()
