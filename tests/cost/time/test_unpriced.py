"""What computes in 8 bits is named, and no seconds are said of it that nobody has."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from lightning_mist.errors import PlanError
from lightning_mist.model import LayerSeconds, attach_seconds, describe_optimizer, trace_model
from lightning_mist.plan import SearchSpace
from lightning_mist.tuner import Planner
from tests.specs import cluster, profile

WIDTH = 32


def in_float8(x):
    scale = 448.0 / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).to(torch.float8_e4m3fn), 1 / scale


class Product(torch.autograd.Function):
    """As libraries for training in float8 multiply: operands scaled by their largest entry."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        (a, scale_a), (b, scale_b) = in_float8(x), in_float8(weight)
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear) for _ in range(4))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return F.mse_loss(batch, torch.zeros_like(batch))


class Wrapper(torch.Tensor):
    """State of 8 bits behind a tensor that looks like one of 32."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [item.codes.float() if isinstance(item, Wrapper) else item for item in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*plain, **(kwargs or {})))


class Quantized(torch.optim.Optimizer):
    """A moment in 8 bits."""

    def __init__(self, params, lr=1e-3, wrapped=False):
        super().__init__(params, {"lr": lr, "wrapped": wrapped})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    codes = torch.zeros(parameter.shape, dtype=torch.uint8)
                    state["moment"] = Wrapper(codes) if group["wrapped"] else codes
                codes = state["moment"].codes if group["wrapped"] else state["moment"]
                moment = 0.9 * codes.float() + 0.1 * parameter.grad
                codes.copy_(moment.abs().clamp(0, 255).to(torch.uint8))
                parameter.sub_(moment, alpha=group["lr"])


def described(module, optimizer=torch.optim.SGD):
    return trace_model(module, torch.randn(32, WIDTH), optimizer=optimizer)


def tuned(spec):
    machine = cluster(2)
    search = SearchSpace(tensor_parallel_degrees=(1,))
    return Planner(spec, machine, profile=profile()).tune(global_batch_size=32, search=search)


def test_products_in_float8_are_named_and_have_no_price():
    spec = described(Net(Float8Linear))
    assert spec.unpriced == ("blocks.0.up computes aten._scaled_mm in float8_e4m3fn",)
    assert "blocks.0.up computes aten._scaled_mm in float8_e4m3fn: profiles have no rates of that" in spec.notes
    with pytest.raises(PlanError, match=r"no seconds of Net: blocks\.0\.up computes aten\._scaled_mm in float8_e4m3fn"):
        tuned(spec)


def test_their_seconds_are_those_of_layers_that_were_timed():
    spec = described(Net(Float8Linear))
    one = {"rows": (32,), "forward": (1e-3,), "backward": (2e-3,)}
    layers = {"head": (), spec.layers[0].kind: (0, 1, 2, 3), "tail": ()}
    timed = attach_seconds(spec, [LayerSeconds(kind=kind, layers=of, **one) for kind, of in layers.items()])
    assert tuned(timed).plan.predicted.step_seconds > 0


def test_float8_that_is_only_kept_is_priced():
    class Kept(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.weight = nn.Parameter(self.weight.data.to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype), self.bias)

    spec = described(Net(Kept))
    assert spec.unpriced == ()
    assert tuned(spec).plan.predicted.step_seconds > 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_8_bits_is_counted_and_its_step_has_no_price(wrapped):
    module = Net()
    optimizer = Quantized(module.parameters(), wrapped=wrapped)
    found = describe_optimizer(optimizer)
    assert found.narrow_state == "uint8"
    assert found.state_bytes_per_parameter_byte == 0.25
    spec = described(module, optimizer)
    assert "Quantized keeps state in uint8: its bytes are an average over all parameters" in spec.notes
    with pytest.raises(PlanError, match="no seconds of Quantized: it keeps state in uint8"):
        tuned(spec)
    timed = replace(spec, optimizer=replace(spec.optimizer, step_seconds_per_parameter_byte=1e-10))
    assert tuned(timed).plan.predicted.step_seconds > 0
