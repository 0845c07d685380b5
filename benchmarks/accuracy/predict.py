"""Predictions for given plans on this machine, in the processes that will run them.

Measures the machine and the layers on all processes at once, traces the model, and writes every plan with its
prediction. Started by :mod:`benchmarks.launch`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.plans import plans_for_two
from benchmarks.workload import add_size_arguments, example
from lightning_mist.cost import predict
from lightning_mist.hardware import detect, measure_profile, measuring_groups
from lightning_mist.model import map_module, time_layers, trace_model
from lightning_mist.plan import to_json
from lightning_mist.runtime.batches import slice_rows


def main() -> None:
    """Predict in every process, write in the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_size_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    cluster = detect(dist.get_world_size(), 1, device.type)
    with measuring_groups(cluster) as groups:
        profile = measure_profile(cluster=cluster, device=device, dtypes=[torch.float32], groups=groups)
    module, data = example(options)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

    def step(item: object) -> object:
        return module.training_step(item, 0)

    found = map_module(module, step, batch)
    rows = options.batch_size
    sizes = sorted({1, 2, 4, rows, 2 * rows} & set(range(1, rows + 1)))
    dist.barrier()
    seconds = time_layers(
        module, found, lambda size: slice_rows(batch, 0, size), sizes, step, device=device, progress=_ignore
    )
    spec = trace_model(module, batch, call=step, module_map=found, optimizer=torch.optim.AdamW)
    spec = replace(spec, seconds=seconds)
    if dist.get_rank() == 0:
        plans = plans_for_two(options.layers, options.batch_size)
        predicted = {
            name: json.loads(to_json(replace(plan, predicted=predict(spec, profile, cluster, plan))))
            for name, plan in plans.items()
        }
        options.out.write_text(json.dumps(predicted))
    dist.destroy_process_group()


def _ignore(*_: object) -> None:
    """No progress is wanted."""


if __name__ == "__main__":
    main()
