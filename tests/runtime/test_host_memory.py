"""Host memory, and copies of streams beside what computes and an allocator that gives freed memory out again."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from lightning_mist.devices import HostOps, ops_of
from lightning_mist.errors import PlanError
from lightning_mist.runtime.host_memory import ALIGNMENT_BYTES, CopyStreams, HostPool, is_host
from lightning_mist.runtime.recording import StorageMeter
from tests.devices.kinds import DEVICES
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("ended_streams")


def test_views_have_the_forms_of_others_and_begin_at_aligned_places():
    like = [torch.ones(3, dtype=torch.float64), torch.ones(4, 5).t(), torch.ones(2, dtype=torch.bfloat16)]
    pool = HostPool(HostOps())
    found = pool.take(like)
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in like]
    start = found[0].data_ptr()
    assert [(t.data_ptr() - start) % ALIGNMENT_BYTES for t in found] == [0, 0, 0]
    assert pool.nbytes == 64 + 128 + 64
    for index, tensor in enumerate(found):
        tensor.fill_(index)
    assert [set(t.flatten().tolist()) for t in found] == [{0.0}, {1.0}, {2.0}]


def test_a_tensor_that_is_not_dense_gets_a_dense_place():
    (found,) = HostPool(HostOps()).take([torch.ones(3, 1).expand(3, 4)])
    assert found.is_contiguous()


def test_more_than_the_budget_is_refused():
    pool = HostPool(HostOps(), budget=200)
    pool.take([torch.ones(32)])
    with pytest.raises(PlanError, match=r"offloading needs 256 B of host memory or more, and 200 B may be used"):
        pool.take([torch.ones(32)])
    assert pool.nbytes == 128


def test_memory_is_that_of_the_host_and_lives_as_long_as_its_tensors():
    pool = HostPool(HostOps())
    (found,) = pool.take([torch.ones(8)])
    assert is_host(found.view(2, 4).untyped_storage())
    assert not is_host(torch.ones(8).untyped_storage())
    meter = StorageMeter()
    meter.observe([found])
    with meter:
        found.add_(1)
    assert meter.peak_bytes == 0
    alive = weakref.ref(found.untyped_storage())
    del found, meter
    gc.collect()
    assert alive() is None


def resident_bytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def test_what_is_in_files_takes_no_memory_when_it_has_been_copied(tmp_path):
    ops, size = HostOps(), 1 << 26
    pool, streams, room = (
        HostPool(ops, budget=0, directory=tmp_path / "new"),
        CopyStreams(ops),
        torch.full((size // 4,), 2.0),
    )
    homes = [pool.take([room])[0] for _ in range(3)]
    before = resident_bytes()
    for home in homes:
        streams.store([home], [room])
    streams.settle()
    assert resident_bytes() - before < size // 4
    back = torch.empty_like(room)
    for home in homes:
        streams.wait(streams.load([back], [home]))
        assert torch.equal(back, room)
        assert is_host(home.untyped_storage())
    assert resident_bytes() - before < size + size // 4
    # A file without a name: nobody has to clean up.
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"offload_directory='.*file': no file of 128 B can be made there"):
        HostPool(HostOps(), directory=tmp_path / "file").take([torch.ones(32)])


ELEMENTS = 1 << 22


def make(device):
    """CopyStreams, and two places in host memory."""
    streams = CopyStreams(ops_of(device))
    return streams, *HostPool(streams.ops).take([torch.empty(ELEMENTS, device=device)] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_waited_for_may_be_freed(device):
    streams, home, _ = make(device)
    for number in range(4):
        there = torch.full((ELEMENTS,), float(number), device=device)
        streams.wait(streams.store([home], [there]))
        del there
        torch.full((ELEMENTS,), -1.0, device=device)
        streams.settle()
        assert bool((home == number).all())


@pytest.mark.parametrize("device", DEVICES)
def test_what_arrives_is_there_for_who_waits(device):
    streams, home, other = make(device)
    for number in range(4):
        home.fill_(number)
        torch.full((ELEMENTS,), -1.0, device=device).mul_(2.0)
        there = torch.empty(ELEMENTS, device=device)
        # It was the product's until that has been computed.
        streams.wait(streams.load([there], [home], after=[streams.ops.record()]))
        there += 1
        streams.store([other], [there])
        streams.settle()
        assert bool((other == number + 1).all())
    assert streams.loaded_bytes == streams.stored_bytes == 4 * 4 * ELEMENTS


@pytest.mark.parametrize("device", DEVICES)
def test_directions_are_ordered_by_events_alone(device):
    streams, home, other = make(device)
    there, back = torch.arange(ELEMENTS, device=device).float(), torch.empty(ELEMENTS, device=device)
    for _ in range(4):
        there += 1
        out = streams.store([home, other], [there, there])
        streams.wait(streams.load([back], [other], after=[out, streams.ops.record()]))
        streams.wait(out)
        assert torch.equal(back, there)
