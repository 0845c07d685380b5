"""Weights in two types: computed with in 16 bits, kept and updated in 32 (*master weights*).

Outside of a batch a trained parameter is its master: optimizer, hooks, callbacks, clipping and checkpoints see 32 bits,
gradients included. Inside of a batch the same parameter is its cast to the type that is computed in. Autograd adds up
gradients in the masters' type (torch's ``Tensor.grad_dtype``); they travel between data-parallel ranks in the other.

A rank keeps the masters of what it updates. From ZeRO-1 on the masters of others are absent outside of batches; up to
ZeRO-2 every rank keeps all casts, under ZeRO-3 those of its own masters, given out where units are gathered. Parameters
that are not trained have the computing type all the time.

The same arithmetic is that of FSDP2's ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` and of DeepSpeed's and
Megatron's bf16 optimizers with accumulation in fp32.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.parameters.absent_parameters import make_absent, make_present
from lightning_mist.runtime.parameters.unit_shards import UnitShards


class MasterWeights:
    """The masters and casts of one rank.

    Args:
        every: All parameters of the module by canonical name, in the type that is computed in.
        values: The masters of those that are trained, whole; from now on the parameters are these.
        shards: Gives out units under ZeRO-3, if the rank has any.

    Attributes:
        away: Trained parameters of this rank's stages whose masters are with others, by canonical name.

    Raises:
        PlanError: If this torch keeps no gradients of another type than the parameter's.
    """

    def __init__(
        self, mesh: Mesh, every: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], shards: UnitShards | None
    ) -> None:
        self._every, self._mesh, self._shards = every, mesh, shards
        self.types = {name: every[name].dtype for name in values}
        held = [item for item in mesh.held if item.name in values]
        self._held = [item.name for item in held]
        shares = mesh.is_sharded and mesh.plan.stages[mesh.stage].zero_stage >= ZeroStage.OPTIMIZER
        owner = {item.name: item.owner(mesh.stage) if shares else mesh.shard_index for item in held}
        self.away = {name: every[name] for name in self._held if owner[name] != mesh.shard_index}
        self._where = {name: f"on rank {mesh.shard_peers[owner[name]]} (zero_stage 1 or more)" for name in self.away}
        self._gives_units = shares and mesh.plan.stages[mesh.stage].zero_stage >= ZeroStage.PARAMETERS
        self._casts: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = {}
        self._nothing: dict[str, Tensor] = {}
        self.is_engaged = self.refuses_use = False
        check_gradient_types()
        for name, value in values.items():
            every[name].grad_dtype = value.dtype
            every[name].data = value

    def engage(self) -> None:
        """Keep what this rank has to keep of parameters that are whole; :meth:`rest` lets the others' masters go."""
        self.is_engaged = True
        for name in self._held:
            value = self._every[name].detach()
            if name in self.away:
                one = torch.full((), math.nan, dtype=value.dtype, device=value.device)
                self._nothing[name] = one.expand(value.shape)
            else:
                self._masters[name] = self._every[name].data
            if not self._gives_units:
                self._casts[name] = value.to(self.types[name])
        if self._gives_units and self._shards is not None:
            self._shards.masters = self._masters

    def disengage(self) -> None:
        """Let go of everything: the parameters are whole masters."""
        self.is_engaged = False
        self._casts.clear()
        self._masters.clear()
        self._nothing.clear()

    def compute(self) -> None:
        """A batch begins: parameters are what is computed with."""
        for name in self._masters:
            self._masters[name] = self._every[name].data  # perhaps other storage than they had
        if self._gives_units:
            assert self._shards is not None
            self._shards.compute()
            return
        make_present(self._every[name] for name in self._held)
        if not self.away:
            # Nothing is given out then: whoever changed a master since the last batch has it counted here.
            self._cast()
        for name in self._held:
            self._every[name].data = self._casts[name]

    def rest(self) -> None:
        """A batch has ended: parameters are their masters, gradients of their type included."""
        for name in self._held:
            self._every[name].data = self._nothing[name] if name in self.away else self._masters[name]
        make_present(self._every[name] for name in self._masters)
        if self.refuses_use:
            make_absent(self.away, lambda name: self._where[name])

    def given_out(self) -> dict[str, Tensor]:
        """The casts by canonical name, of this rank's own masters after the optimizer's step (ZeRO-1, ZeRO-2)."""
        self._cast()
        return self._casts

    def casts(self) -> list[Tensor]:
        """What this rank keeps of the type that is computed in, beside masters."""
        flats = self._shards.flats if self._gives_units and self._shards is not None else ()
        return [*self._casts.values(), *flats]

    def _cast(self) -> None:
        names = [name for name in self._masters if name in self._casts]
        if not names:
            return  # of a rank that owns nothing, or under ZeRO-3
        with torch.no_grad():
            torch._foreach_copy_([self._casts[name] for name in names], [self._masters[name] for name in names])


def check_gradient_types() -> None:
    """Refuse a torch whose gradients must have the type of their parameter."""
    if not hasattr(torch.empty(0), "grad_dtype"):
        raise PlanError(
            f"master_weights=True with torch {torch.__version__}: gradients are added up in 32 bits for parameters of "
            "16 bits by Tensor.grad_dtype, which torch has from 2.10 on; use a newer torch, or precision='bf16-mixed'"
        )


@contextmanager
def computing(parameters: Mapping[nn.Parameter, torch.dtype]) -> Iterator[None]:
    """Inside, whole parameters are their casts, and their masters again afterwards: for evaluation."""
    masters = {parameter: parameter.data for parameter in parameters}
    with torch.inference_mode(False), torch.no_grad():
        for parameter, dtype in parameters.items():
            parameter.data = masters[parameter].to(dtype)
    try:
        yield
    finally:
        with torch.inference_mode(False):
            for parameter, master in masters.items():
                parameter.data = master
