import dataclasses

import pytest

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_megatron import MegatronRank, MegatronRun

RUN = MegatronRun(
    layers=8,
    hidden=256,
    ffn=1024,
    heads=8,
    kv_heads=2,
    length=128,
    positions=128,
    dropout=0.1,
    vocabulary=500,
    vocabulary_multiple=128,
    tensor=1,
    pipeline=1,
    chunks=1,
    microbatch=1,
    batch=4,
    world=2,
)


def run(layout):
    device = SimulatedDevice()
    with device:
        rank = MegatronRank(device, layout)
        held = device.allocator.requested
        for _ in range(2):
            rank.step()
        return held, device.allocator.requested, device.peak_allocated


def test_vocabulary_is_padded_for_every_rank():
    assert RUN.vocabulary_part == 512
    assert dataclasses.replace(RUN, tensor=2, world=4).vocabulary_part == 256


def test_states_are_6_bytes_and_a_share_of_12_and_nothing_remains_of_a_step():
    held, after, _ = run(RUN)
    assert after == held
    joint = 256 // 8 * (8 + 2 * 2)
    layer = 4 * 256 + joint * 256 + joint + 256 * 256 + 2 * 256 * 1024
    parameters = 8 * layer + 512 * 256 + 128 * 256 + 2 * 256 + 512 * 256
    assert held == pytest.approx((6 + 12 / 2) * parameters, rel=0.001)


def test_an_interleaved_rank_holds_microbatches_of_all_its_parts():
    """The last of 2 ranks with 4 parts: 3 parts of 2 microbatches are in flight when the first backward begins."""
    layout = dataclasses.replace(RUN, pipeline=2, chunks=4, world=4, batch=8, length=512, positions=512)
    held, after, peak = run(layout)
    assert after == held
    # A layer keeps 2 bytes for each of 16.25 times its input (norms twice, projection 1.5, query, attention, MLP 8)
    # and 2 masks of 1 byte.
    layer = 512 * 256 * (2 * (4 + 1.5 + 2 + 8) + 2)
    assert 7 * layer < peak - held < 9.5 * layer
