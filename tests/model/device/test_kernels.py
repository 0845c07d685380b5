import threading

import torch
import torch.nn.functional as F

from lightning_mist.model.device.kernels import Kernel, KernelRegistry, Target, overload_of
from tests.model.fake_steps import fakes

TARGET = Target(torch_version=(2, 13), capability=(8, 0))


def marking(target: Target, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> object:
    return x.new_empty(7) if dim == 0 else NotImplemented


REGISTRY = KernelRegistry(
    [Kernel(operator="softmax.int", key="AutogradCPU", compute=marking, keeps="nothing", source="this test")]
)


def test_names_of_operators() -> None:
    assert overload_of("softmax.int") is torch.ops.aten.softmax.int
    assert overload_of("dropout") is torch.ops.aten.dropout.default


def test_kernels_are_for_fakes_and_may_decline() -> None:
    (x,) = fakes((3, 4))
    with REGISTRY.in_force(TARGET):
        assert F.softmax(x, 0).shape == (7,)
        assert torch.softmax(x, 0).shape == x.softmax(0).shape == (7,)
        assert F.softmax(x, 1).shape == (3, 4)
        assert F.softmax(torch.ones(3, 4), 0).shape == (3, 4)
    assert F.softmax(x, 0).shape == (3, 4)


def test_kernels_are_for_threads_that_asked_for_them() -> None:
    (x,) = fakes((3, 4))
    shapes = []

    def other(within: bool) -> None:
        if within:
            with REGISTRY.in_force(TARGET):
                shapes.append(tuple(F.softmax(x, 0).shape))
        shapes.append(tuple(F.softmax(x, 0).shape))

    with REGISTRY.in_force(TARGET):
        for within in (False, True):
            thread = threading.Thread(target=other, args=(within,))
            thread.start()
            thread.join()
        with REGISTRY.in_force(TARGET):
            pass
        shapes.append(tuple(F.softmax(x, 0).shape))
    assert shapes == [(3, 4), (7,), (3, 4), (7,)]
