"""Plans with predictions, to be drawn."""

import dataclasses
from functools import lru_cache

from lightning_mist.cost import StageCostModel, predict, with_units
from lightning_mist.plan import plan_of
from tests.specs import cluster, profile, spec

MACHINE = dataclasses.replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)


@lru_cache(maxsize=64)
def predicted(stages=2, microbatches=4, *, devices=None, kind="cuda", layers=8, **options):
    """A plan of equal stages with what the cost model says of it."""
    devices = devices or stages
    rows = 2 * microbatches * devices // stages
    network = spec(layers, measured=True)
    plan = plan_of(
        layers,
        world_size=devices,
        global_batch_size=rows,
        pipeline_stages=stages,
        num_microbatches=microbatches,
        **options,
    )
    found = predict(network, MACHINE, cluster(devices, kind=kind), plan)
    return dataclasses.replace(plan, predicted=found)


def with_channels(stages=2, microbatches=4, **options):
    """The same, with what happens unit by unit."""
    plan = predicted(stages, microbatches, **options)
    network = spec(plan.num_layers, measured=True)
    return with_units(StageCostModel(network, MACHINE, cluster(plan.world_size, kind="cuda")), plan)


def rows_of(stage, name):
    """Rows of the units of a predicted stage in a pass."""
    values = dict(stage.units).get(f"channels.{name}", ())
    return [values[index : index + 6] for index in range(0, len(values), 6)]
