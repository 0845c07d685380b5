"""What the fullest of many ranks has of a network's trained parameters, over what each has in the mean.

python -m benchmarks.planner.shard_sizes

Dealt out whole, as to optimizers that look at more than one entry; in the even pieces of a unit's flat buffer; and by
rows as PyTorch's ``fully_shard`` (FSDP2) cuts them: ``ceil(rows / ranks)`` of each parameter. Arithmetic only.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from benchmarks.plans import data_parallel
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.model.presets.specs import preset_map
from lightning_mist.plan import ModuleMap, ParameterUse
from lightning_mist.plan.mesh import held_parameters
from lightning_mist.schedule.flats import stage_flats

DEGREES = (2, 8, 64, 256, 1024)


def gpt2(layers: int = 12, width: int = 768, words: int = 50257, length: int = 1024) -> ModuleMap:
    """OpenAI's smallest, whose head is its token table."""
    used = [("wte", (words, width), (-1, layers - 1)), ("wpe", (length, width), (-1,))]
    for index in range(layers):
        for name, shape in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            used += [(f"h.{index}.{name}.weight", shape, (index,)), (f"h.{index}.{name}.bias", shape[1:], (index,))]
        used += [(f"h.{index}.ln_{k}.{part}", (width,), (index,)) for k in (1, 2) for part in ("weight", "bias")]
    used += [(f"ln_f.{part}", (width,), (layers - 1,)) for part in ("weight", "bias")]
    uses = (
        ParameterUse(name=name, slots=((name, "weight", regions),), shape=shape, dtype="float32", requires_grad=True)
        for name, shape, regions in used
    )
    blocks = tuple(f"h.{index}" for index in range(layers))
    return ModuleMap(step="training_step", blocks=blocks, cuts=(), parameters=tuple(uses))


def networks() -> Iterable[tuple[str, ModuleMap]]:
    """What is shared out."""
    yield "gpt2", gpt2()
    for name in ("llama3-8b", "llama3-70b"):
        yield name, preset_map(PRESETS[name], rows=1, length=8192, degrees=(), dtype="bfloat16")


def sizes(name: str, network: ModuleMap, ranks: int) -> Sample:
    """The fullest rank over the mean, by each of the ways."""
    plan = data_parallel(len(network.blocks), ranks, 1, zero=2)
    elements = {use.name: prod(use.shape) for use in network.parameters}
    loads, mean = [0] * ranks, sum(elements.values()) / ranks
    for item in held_parameters(plan, network):
        loads[item.owner(0)] += elements[item.name]
    pieces = sum(flat.piece for flat in stage_flats(plan, replace(network, even_shards=True), 0))
    rows = sum(-(-use.shape[0] // ranks) * prod(use.shape[1:]) for use in network.parameters)
    return {
        "model": name,
        "parameters": sum(elements.values()),
        "ranks": ranks,
        "dealt_out": max(loads) / mean,
        "even_pieces": pieces / mean,
        "rows_of_each": rows / mean,
    }


def main() -> None:
    """Write the record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    samples = [sizes(name, network, ranks) for name, network in networks() for ranks in DEGREES]
    notes = (
        "The fullest rank's trained parameters over the mean, computed from names and sizes: dealt out whole, in even "
        "pieces of one flat buffer a layer, and in ceil(rows / ranks) rows of each parameter as FSDP2 shards."
    )
    print(write_record(make_record("shard-sizes", samples, notes=notes)))


if __name__ == "__main__":
    main()
