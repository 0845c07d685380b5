"""Plans with predictions, to be drawn."""

import dataclasses
from functools import lru_cache

from lightning_mist.cost import predict
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
