"""Random small questions to the whole planner; for tests only."""

from dataclasses import replace
from functools import cache

import numpy as np

from lightning_mist.hardware import Link, MixedCluster
from lightning_mist.model import map_module, trace_model
from lightning_mist.tensors import slice_rows
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space.applied_space import OFFLOADED
from lightning_mist.tuner.space.usable_memory import USABLE_MEMORY
from tests import zoo
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.whole_space import Instance, candidates_of, pipelines, places_of, priced

MOST_CANDIDATES = 15_000
"""Stage candidates that an instance may have, so that each takes a fraction of a second."""

OFFLOADING, UNLIKE, LIMITED, BY_OPERATOR, IN_GROUPS, EVEN = 0.5, 0.25, 0.12, 0.5, 0.5, 0.5
"""Share of instances whose spaces offload, whose devices are of two kinds, which have each of the other limits, whose
layers may be recomputed by operator, where ZeRO may shard within groups, and where it gives ranks even pieces."""


def size_of(instance):
    """Stage candidates of an instance."""
    return sum(
        len(candidates_of(instance, len(parts), index, kind))
        for _, parts, arrangements in pipelines(instance)
        for index, kind in places_of(arrangements)
    )


def random_instance(
    seed,
    *,
    offloading=OFFLOADING,
    unlike=UNLIKE,
    equal_stages=False,
    by_operator=BY_OPERATOR,
    fewer_loaders=False,
    checkpoints=False,
):
    """A network, a machine, a batch, a space and a memory limit that mostly binds, and sometimes cannot be met.

    Args:
        seed: Instances of one seed are equal.
        offloading: Share of spaces that offload.
        unlike: Share of machines with two kinds of devices.
        equal_stages: Whether all stages have equally many layers and devices.
        by_operator: Share of spaces with recomputation by operator, half of them with nothing else.
        fewer_loaders: Whether not every device loads a batch of its own.
        checkpoints: Whether inputs of recomputed layers have a share of their own, mostly beside that of activations.
    """
    rng, other = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    kinds = (("full", "selective"), ("selective",))[other.integers(2)] if other.random() < by_operator else ("full",)
    groups = (2,) if np.random.default_rng([seed, 2]).random() < IN_GROUPS else ()
    even = np.random.default_rng([seed, 3]).random() < EVEN
    while True:
        found = _random_instance(rng, offloading, unlike)
        found = replace(found, network=found.network.evenly()) if even else found
        found = replace(found, search=replace(found.search, checkpointing_kinds=kinds, shard_degrees=groups))
        found = _loading(found, other) if fewer_loaders else found
        if checkpoints:
            named = dict.fromkeys((*found.search.offload, *["activations"] * (seed % 4 > 0), "checkpoints"))
            found = replace(found, search=replace(found.search, offload=tuple(named), checkpointing=True))
        if equal_stages:
            found = replace(found, search=replace(found.search, layer_cuts=None, equal_stages=True))
        if size_of(found) <= MOST_CANDIDATES:
            return _limited(found, rng)


def _loading(found, rng):
    """A batch that is no multiple of the devices, or fewer loaders than devices."""
    world = found.machine.world_size
    if rng.random() < 0.5:
        return replace(found, rows=int(rng.integers(0, 3)), rows_left=int(rng.integers(1, max(2, world))))
    loaders = int(rng.choice([count for count in range(1, world + 1) if world % count == 0]))
    return replace(found, search=replace(found.search, data_parallel_size=loaders))


def _random_instance(rng, offloading, unlike):
    network, kind = _network(rng), str(rng.choice(["cpu", "cuda"]))
    machine, rates = _machine(rng, kind, unlike), _rates(rng)
    if len(machine.parts) > 1:
        # What was measured was so on one kind of device.
        network, rates = replace(network, seconds=()), (rates, _rates(rng))
    splits = [item for item in ((2, False), (2, True), (4, False)) if rng.random() < 0.4]
    if kind == "cpu" or rng.random() < 0.5:
        splits = splits[:1]
    return Instance(
        network=with_splits(network, *splits) if splits else network,
        machine=machine,
        rates=rates,
        rows=int(rng.choice([1, 2, 4])),
        memory_limit=10**15,
        search=_search(rng, network.num_layers, machine.world_size, offloading),
    )


def _search(rng, layers, devices, offloading):
    """A space with a few of the limits that there are."""
    offload, ratios = _offload(rng, offloading)
    limits = {
        "num_stages": (int(rng.integers(1, devices + 1)),),
        "microbatch_sizes": (1, 2),
        "data_parallel_degrees": (1, 2),
        "devices_per_stage": tuple(range(1, int(rng.integers(1, devices + 1)) + 1)),
        "checkpointed_shares": (0.0, float(rng.choice([0.5, 1.0]))),
    }
    limits = {name: value for name, value in limits.items() if rng.random() < LIMITED}
    cuts = sorted({int(cut) for cut in rng.integers(1, max(2, layers), size=int(rng.integers(0, 3)))})
    if rng.random() < LIMITED and layers > max(cuts, default=0) and len(cuts) < devices:
        limits = {**limits, "layer_cuts": tuple(cuts)}
        limits.pop("num_stages", None)
    return SearchSpace(
        zero_stages=tuple(sorted({int(level) for level in rng.integers(0, 4, size=int(rng.integers(1, 4)))})),
        checkpointing=bool(rng.random() < 0.8),
        offload=offload,
        offload_ratios=ratios,
        schedules=("1f1b",),
        **limits,
    )


def _machine(rng, kind, unlike):
    """Up to four devices, in one or two nodes, or one and up to three of another kind."""
    if rng.random() < unlike:
        sizes = rng.permutation([1, int(rng.integers(1, 4))]) if rng.random() < 0.7 else (2, 2)
        link = None
        if rng.random() < 0.5:
            link = Link(bytes_per_second=10 ** rng.uniform(6, 10), latency_seconds=1e-5)
        return MixedCluster(parts=tuple(cluster(int(size), kind=kind) for size in sizes), link=link)
    devices = int(rng.choice([1, 2, 3, 4], p=[0.08, 0.32, 0.2, 0.4]))
    return cluster(devices, nodes=2 if devices in (2, 4) and rng.random() < 0.3 else 1, kind=kind)


def _rates(rng):
    rates = profile(
        flops_per_second=10 ** rng.uniform(9, 11.5), link=10 ** rng.uniform(6, 10), latency=10 ** rng.uniform(-6, -3)
    )
    copies = {f"{way}_bytes_per_second": 10 ** rng.uniform(6, 10) for way in ("host_to_device", "device_to_host")}
    return replace(rates, **copies, host_bytes_per_second_per_node=float(rng.choice([0.0, 1e8])))


def _offload(rng, offloading):
    """Kinds of state that may be offloaded, and shares; the more kinds the fewer shares."""
    if rng.random() >= offloading:
        return (), (0.0, 1.0)
    kinds = tuple(name for name in OFFLOADED if rng.random() < 0.5)
    return kinds, (0.0, 0.5, 1.0) if len(kinds) < 3 else (0.0, 0.6)


def _network(rng):
    layers = int(rng.choice([0, 1, 2, 3, 4, 5, 6], p=[0.03, 0.07, 0.15, 0.2, 0.2, 0.2, 0.15]))
    unlike = layers > 1 and rng.random() < 0.4
    kinds = tuple(int(kind) for kind in rng.integers(0, 2, size=layers)) if unlike else (0,) * layers
    widths = tuple(int(4 * 10 ** rng.uniform(1.5, 5)) for _ in range(2))
    return spec(
        layers,
        kinds=kinds,
        widths=widths,
        parameter_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        edge_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        tied=bool(rng.random() < 0.3) and layers > 0,
        measured=bool(rng.random() < 0.5),
    )


def with_chunks(instance, seed):
    """The question of a traced network with as many layers, what is behind which may be cut into chunks."""
    search = replace(instance.search, tail_chunks=(1, 2, 4))
    network = traced(instance.network.num_layers)
    if seed % 2:
        network = replace(network, module_map=network.module_map.excluding("it pools", "tail_tokens"))
    found = replace(instance, network=network, rows=4 * instance.rows, search=search, known={})
    return _limited(found, np.random.default_rng([seed, 3]))


@cache
def traced(layers):
    """A small network, all allocations of which are known."""
    module, (_, make_batch) = zoo.gpt2(layers, vocabulary=8_000), zoo.make("gpt2")
    batch = make_batch(4)
    found = map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, 3))
    return trace_model(module, batch, call=zoo.step(module), module_map=found)


def _limited(question, rng):
    """The question with a limit between what the least and the most demanding stages need, or a little below."""
    peaks = [
        priced(question, count, parts, index, kind).peak_K
        for count, parts, arrangements in pipelines(question)
        for index, kind in places_of(arrangements)
    ]
    if not peaks:
        return question
    peak_K = np.sort(np.concatenate(peaks))
    share = USABLE_MEMORY if question.machine.kind == "cuda" else 1.0
    host = None
    if question.search.offload and rng.random() < 0.5:
        host = int(10 ** rng.uniform(3, 6.5)) * question.machine.devices_per_node
    wanted = max(1, int(peak_K[int(rng.random() * (len(peak_K) - 1))] * rng.choice([0.6, 1.0, 1.02, 1.3]) / share))
    machine = question.machine
    if len(machine.parts) > 1:  # One part may have less than what is allowed.
        sizes = (int(wanted * rng.choice([0.5, 1.0, 2.0])) + 1, 10**9)
        parts = [
            replace(part, device=replace(part.device, name=f"test {index}", memory_bytes=size))
            for index, (part, size) in enumerate(zip(machine.parts, sizes, strict=True))
        ]
        machine = replace(machine, parts=tuple(parts))
    return replace(question, machine=machine, memory_limit=wanted, host_memory_limit=host)
