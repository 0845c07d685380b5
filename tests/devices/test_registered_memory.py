"""Host memory that is page-locked where it is: by the driver on a card, by a stand-in for its calls here."""

import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_mist.devices.ops import AcceleratorOps
from lightning_mist.runtime.host_memory import CopyStreams, HostPool, is_host
from tests.devices.kinds import CARD


class Calls:
    """Writes down what the runtime is asked for, and asks it if there is one."""

    def __init__(self, runtime=None, *, result=0):
        self.made, self._runtime, self._result = [], runtime, result

    def cudaHostRegister(self, address, nbytes, flags):
        self.made.append(("register", address, nbytes))
        return self._result if self._runtime is None else self._runtime.cudaHostRegister(address, nbytes, flags)

    def cudaHostUnregister(self, address):
        self.made.append(("unregister", address))
        result = self._result if self._runtime is None else self._runtime.cudaHostUnregister(address)
        assert int(result) == 0
        return result


def check_error(code):
    if code != 0:
        raise RuntimeError(f"error {code}")


@pytest.fixture(params=["stand-in", pytest.param("driver", marks=pytest.mark.gpu)])
def ops_and_calls(request):
    ops = AcceleratorOps(CARD)
    if request.param == "driver":
        calls = Calls(torch.cuda.cudart())
        with mock.patch.object(torch.cuda, "cudart", return_value=calls):
            yield ops, calls
        return
    calls = Calls()
    ops._module = SimpleNamespace(cudart=lambda: calls, check_error=check_error)
    with mock.patch.object(torch.accelerator, "synchronize", lambda device: calls.made.append(("wait", device))):
        yield ops, calls


def test_memory_is_registered_in_its_size_as_long_as_somebody_has_it(ops_and_calls):
    ops, calls = ops_and_calls
    pool = HostPool(ops)
    first, second = pool.take([torch.empty(1001), torch.empty(3, 5, dtype=torch.float64)])
    address = first.data_ptr()
    assert calls.made == [("register", address, pool.nbytes)]
    assert pool.nbytes == 4032 + 128
    assert is_host(second.untyped_storage())
    is_real = not isinstance(ops._module, SimpleNamespace)
    if is_real:
        assert first.is_pinned()
        assert second.is_pinned()
    del first
    gc.collect()
    assert len(calls.made) == 1
    del second
    gc.collect()
    # Copies that streams wait for may still be running.
    waits = [] if is_real else [("wait", CARD)]
    assert calls.made[1:] == [*waits, ("unregister", address)]


def test_memory_that_cannot_be_registered_is_an_error():
    ops = AcceleratorOps(CARD)
    ops._module = SimpleNamespace(cudart=lambda: Calls(result=2), check_error=check_error)
    with pytest.raises(RuntimeError, match="error 2"):
        ops.mapped_host_memory(64)


@pytest.mark.gpu
def test_memory_outlives_the_copies_that_streams_have_been_asked_for():
    ops, size = AcceleratorOps(CARD), 1 << 26
    streams = CopyStreams(ops)
    there = torch.zeros(size, dtype=torch.uint8, device=CARD)
    for number in range(1, 9):
        (home,) = HostPool(ops).take([there])
        home.fill_(number)
        streams.wait(streams.load([there], [home], after=[ops.record()]))
        del home  # The copy has just begun.
        assert bool((there == number).all())
