"""The machines of published runs, as far as they differ from the catalog's: links, power, and how kernels are launched.

What a source says of its machine, in words of ``beside``, becomes a link of the cluster or factors on the profile:

* Boards for export have NVLinks of 400 GB/s, both directions together.
* An H100 held to 500 W. Products of 8192 and 10240 take a board of 350 W 1 / 0.62 and 1 / 0.66 of what they take one of
  700 W (torch-performance-test-data issues 95 and 79: 492.8 and 471.8 against 797.5 and 719.7 TFLOP/s), so that rates
  go with power to the 0.65; attention is made of products. Its six stacks of HBM2e have 1024 bits at 3.2 Gbit/s each
  (JESD235D).
* Reductions in float32 move twice the bytes of gradients in 16 bits.
* ``CUDA_LAUNCH_BLOCKING=1``: every operator waits for the one before to end and is launched then, so that a stage waits
  for what it sends as for what it receives, twice as long.
* Reductions that begin when the last backward has ended have nothing to hide behind.
* Stacks other than ``flash2`` run FlashAttention-2 too where sources say so.
* Deterministic attention takes longer in backward: 1 / 0.55 on A100s, up to 1 / 0.87 with cuDNN (cudnn-frontend
  benchmark/attention_training/results).
"""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.accuracy.published_run_rows import PublishedRun
from lightning_mist.hardware import Cluster, HardwareProfile, Link, parse_cluster, single
from lightning_mist.hardware.catalog import capability_of, catalog_profile, with_stack
from lightning_mist.hardware.catalog.catalog_device import INFINIBAND_FLOOR
from lightning_mist.hardware.catalog.devices import find_device
from lightning_mist.units import parse_rate

WIDE, WAITING, AFTER = "reductions in float32", "launches that wait", "reductions after the backward"
DETERMINISTIC, FLASH2 = "deterministic kernels", "FlashAttention-2"
HELD = "H100 with HBM2e, 96 GB and 500 W"

NVLINKS = {"A800: NVLink of 400 GB/s": 200e9, "H800: NVLink of 400 GB/s": 200e9}
"""Bytes per second in one direction."""

PRODUCTS_HELD, MEMORY_HELD = (500 / 700) ** 0.65, 6 * 1024 * 3.2e9 / 8 / 3350e9

DETERMINISTIC_BACKWARD = {8: 0.55, 9: 0.87, 10: 0.87}
"""By major compute capability."""


def machine_of(run: PublishedRun) -> Cluster:
    """The machine: the catalog's, with the links that the source states."""
    memory = ":94GiB" if HELD in run.beside else ""
    cluster = single(parse_cluster(f"{run.nodes}x{run.devices}x{run.gpu}{memory}"), "a published run")
    for word in run.beside:
        if word in NVLINKS:
            floor = find_device(run.gpu).intra_node.latency_seconds
            cluster = replace(cluster, intra_node=Link(bytes_per_second=NVLINKS[word], latency_seconds=floor))
    if not run.network or run.nodes == 1:
        return cluster
    rate = run.network.removesuffix(" a device")
    per_node = run.devices if rate != run.network else 1
    link = Link(bytes_per_second=per_node * parse_rate(rate), latency_seconds=INFINIBAND_FLOOR)
    return replace(cluster, inter_node=link)


def profile_of(run: PublishedRun, cluster: Cluster, stack: str, words: tuple[str, ...]) -> HardwareProfile:
    """The catalog's profile of a stack, with what words say of the machine and its launches."""
    profile = with_stack(catalog_profile(cluster), stack)
    if WIDE in words:
        profile = _halved(profile, "reduce_scatter", "reduce")
    if HELD in words:
        profile = _retimed(profile, lambda rate, _: rate * PRODUCTS_HELD, lambda rate, _: rate * MEMORY_HELD)
    if WAITING in words:
        wait = profile.operator_seconds
        profile = _retimed(profile, lambda rate, work: 1 / (1 / rate + wait / work), None)
        profile = _halved(profile, "send_recv")
    if AFTER in words and profile.interference is not None:
        turns = replace(profile.interference, compute_network=1.0, compute_across=1.0)
        profile = replace(profile, interference=turns)
    if FLASH2 in words:
        profile = replace(profile, kernels=with_stack(catalog_profile(cluster), "flash2").kernels)
    if DETERMINISTIC in words:
        part = DETERMINISTIC_BACKWARD[(capability_of(run.gpu) or (8, 0))[0]]
        kernels = (
            replace(item, backward_flops_per_second=part * item.backward_flops_per_second) for item in profile.kernels
        )
        profile = replace(profile, kernels=tuple(kernels))
    return profile


def without_chains(profile: HardwareProfile, cluster: Cluster) -> HardwareProfile:
    """The same with element-wise operators that have no others to be fused with, as GELUs and additions in GPTs."""
    alone = {item.kind: item for item in catalog_profile(cluster).rates}
    rates = tuple(alone[item.kind] if item.kind == "elementwise" else item for item in profile.rates)
    return replace(profile, rates=rates)


def _halved(profile: HardwareProfile, *operations: str) -> HardwareProfile:
    """The same with some collectives at half of their rate."""
    slowed = (
        replace(cost, bytes_per_second=cost.bytes_per_second / 2) if cost.operation in operations else cost
        for cost in profile.collectives
    )
    return replace(profile, collectives=tuple(slowed))


_Rate = Callable[[float, float], float]
"""A rate from another one and the work that it is of."""


def _retimed(profile: HardwareProfile, products: _Rate, memory: _Rate | None) -> HardwareProfile:
    """The same with other rates of products and attention, and of what moves bytes; by default both alike."""
    moved = memory or products

    def rates(values: tuple[float, ...], work: tuple[float, ...], by: _Rate) -> tuple[float, ...]:
        return tuple(by(value, size) for value, size in zip(values, work, strict=True))

    return replace(
        profile,
        compute=tuple(
            replace(item, flops_per_second=rates(item.flops_per_second, item.flops, products))
            for item in profile.compute
        ),
        rates=tuple(
            replace(
                item,
                forward_bytes_per_second=rates(item.forward_bytes_per_second, item.bytes, moved),
                backward_bytes_per_second=rates(item.backward_bytes_per_second, item.bytes, moved),
            )
            for item in profile.rates
        ),
        memory_bytes_per_second=moved(profile.memory_bytes_per_second, float("inf")),
        kernels=tuple(
            replace(
                item,
                forward_flops_per_second=products(item.forward_flops_per_second, float("inf")),
                backward_flops_per_second=products(item.backward_flops_per_second, float("inf")),
            )
            for item in profile.kernels
        ),
    )
