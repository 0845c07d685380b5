"""Weights in two types: computed with in 16 bits, kept and updated in 32 (*master weights*).

Outside of a batch a trained parameter is its master: optimizer, hooks, callbacks, clipping and checkpoints see 32 bits,
gradients included. Inside of a batch the same parameter is its cast to the type that is computed in. Autograd adds up
gradients in the masters' type (torch's ``Tensor.grad_dtype``); they travel between data-parallel ranks in the other.

A rank keeps the masters of what it updates. From ZeRO-1 on the masters of others are absent outside of batches; up to
ZeRO-2 every rank keeps all casts, under ZeRO-3 those of its own masters, given out where units are gathered. Masters
move with their optimizer's state: those that are in host memory are absent outside of batches too, and come to the
device for their update. Parameters that are not trained have the computing type all the time.

The same arithmetic is that of FSDP2's ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` and of DeepSpeed's and
Megatron's bf16 optimizers with accumulation in fp32.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.host_memory import HostPool, let_go
from lightning_mist.runtime.parameters.absent_parameters import is_awaited, make_absent, make_present
from lightning_mist.runtime.parameters.even_shards import FlatShard, where_pieces_are
from lightning_mist.runtime.parameters.unit_shards import UnitShards
from lightning_mist.tensors import is_hollow


class MasterWeights:
    """The masters and casts of one rank.

    Args:
        every: All parameters of the module by canonical name, in the type that is computed in.
        values: The masters of those that are trained, whole; from now on the parameters are these.
        shards: Has the casts of parameters whose values are not here all the time, if the rank has any.
        even: What ranks share out evenly of what is trained.
        offloaded: Canonical names of those whose masters are in the host memory of their owner, by unit.
        pool: That memory.

    Attributes:
        moved: Flat buffers whose masters are in host memory.
        away: Trained parameters of this rank's stages whose masters are not on this device, by canonical name.
        home: Masters of this rank's in host memory, by canonical name.

    Raises:
        PlanError: If this torch keeps no gradients of another type than the parameter's.
    """

    def __init__(
        self,
        mesh: Mesh,
        every: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        shards: UnitShards | None,
        even: Sequence[FlatShard] = (),
        *,
        offloaded: Sequence[Sequence[str]] = (),
        pool: HostPool | None = None,
    ) -> None:
        self._every, self._shards, self._pool = every, shards, pool
        self.types = {name: every[name].dtype for name in values}
        held = [item for item in mesh.held if item.name in values]
        self._held = {every[item.name]: item.name for item in held}
        self._shares = mesh.is_sharded and mesh.plan.stages[mesh.stage].zero_stage >= ZeroStage.OPTIMIZER
        owner = {item.name: item.owner(mesh.stage) if self._shares else mesh.shard_index for item in held}
        self._even = [shard for shard in even if shard.names[0] in values]
        self._where = {
            item.name: (where_pieces_are(mesh) if item.is_even else f"on rank {mesh.shard_peers[owner[item.name]]}")
            + " (zero_stage 1 or more)"
            for item in held
            if item.is_even or owner[item.name] != mesh.shard_index
        }
        self._moved = [[name for name in names if name in owner and name not in self._where] for names in offloaded]
        in_host = set(chain.from_iterable(offloaded))
        self.moved = [shard for shard in self._even if shard.names[0] in in_host]
        self._homes: dict[FlatShard, Tensor] = {}
        self.away = {name: every[name] for name in (*self._where, *chain.from_iterable(self._moved))}
        self._casts: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = {}
        self._nothing: dict[str, Tensor] = {}
        self.home: dict[str, Tensor] = {}
        self.is_engaged = self.refuses_use = self._is_computing = False
        check_gradient_types()
        for name, value in values.items():
            every[name].grad_dtype = value.dtype
            every[name].data = value.to(every[name].device)

    def engage(self) -> None:
        """Keep what this rank has to keep of parameters that are whole; :meth:`rest` lets go of other masters."""
        self.is_engaged = True
        in_shards = () if self._shards is None else self._shards.cast_names
        for parameter, name in self._held.items():
            value = parameter.detach()
            if name in self.away:
                one = torch.full((), math.nan, dtype=value.dtype, device=value.device)
                self._nothing[name] = one.expand(value.shape)
            else:
                self._masters[name] = parameter.data
            if name not in in_shards and not is_hollow(value):
                self._casts[name] = value.to(self.types[name])
        for shard in self._even:
            whole = [parameter.detach() for parameter in shard.parameters]
            shard.updated = shard.empty_piece(whole[0])
            shard.keep(shard.updated, whole)
            if shard in self.moved:
                if shard not in self._homes:
                    assert self._pool is not None
                    (self._homes[shard],) = self._pool.take([shard.updated])
                shard.home = self._homes[shard].copy_(shard.updated)
                shard.updated = None
                let_go(shard.home)
        for names in filter(None, self._moved):
            values = [self._every[name].detach() for name in names]
            if names[0] not in self.home:
                assert self._pool is not None
                self.home.update(zip(names, self._pool.take(values), strict=True))
            for name, value in zip(names, values, strict=True):
                if not is_hollow(value):
                    self.home[name].copy_(value)
                    let_go(self.home[name])
        if self._shards is not None:
            self._shards.masters = self._masters

    def give(self, name: str, value: Tensor) -> None:
        """Keep what this rank keeps of a master that had no values, and its cast."""
        if name in self.home:
            self.home[name].copy_(value)
            let_go(self.home[name])
        elif name in self._masters:
            self._masters[name] = self._every[name].data = value
        for shard in self._even:
            if name in shard.names:
                shard.put(shard.own(), shard.names.index(name), value)
                let_go(shard.own())
        if self._shards is None or not self._shards.give(name, value):
            self._casts[name] = value.to(self.types[name])

    def disengage(self) -> None:
        """Let go of everything on the device: the parameters are whole masters."""
        self.is_engaged = False
        self._casts.clear()
        self._masters.clear()
        self._nothing.clear()
        for shard in self._even:
            shard.updated = shard.home = None

    def compute(self) -> None:
        """A batch begins: parameters are what is computed with."""
        self._is_computing = True
        for name in self._masters:
            self._masters[name] = self._every[name].data  # perhaps other storage than they had
        make_present(parameter for parameter in self._held if not is_awaited(parameter))
        if self._shards is not None:
            self._shards.compute()
        if not self._shares:
            # Nothing is given out then: whoever changed a master since the last batch has it counted here.
            self._cast()
        for name, cast in self._casts.items():
            self._every[name].data = cast

    def rest(self) -> None:
        """A batch has ended, or an update: parameters are their masters, gradients of their type included."""
        self._is_computing = False
        for parameter, name in self._held.items():
            parameter.data = self._nothing[name] if name in self.away else self._masters[name]
        make_present(self._every[name] for name in self._masters if not is_awaited(self._every[name]))
        if self.refuses_use:
            where = {name: self._every[name] for name in self._where}
            make_absent(where, self._where.__getitem__, keeps_gradient=bool(self._even))
            moved = {name: self._every[name] for name in self.away if name not in self._where}
            make_absent(moved, lambda _: "in host memory (offload.optimizer)", keeps_gradient=True)

    def homes(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Masters in host memory of some parameters."""
        names = {parameter: self._held.get(parameter) for parameter in parameters}
        return {parameter: self.home[name] for parameter, name in names.items() if name in self.home}

    def home_of(self, item: nn.Parameter | FlatShard) -> Tensor:
        """The master in host memory of a parameter, or this rank's piece of those of a flat buffer."""
        return self._homes[item] if isinstance(item, FlatShard) else self.home[self._held[item]]

    @contextmanager
    def updating(self, parameters: Collection[nn.Parameter], fetched: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
        """Inside, some of this rank's parameters are their masters; behind it their casts are what these became.

        Args:
            fetched: Masters that are otherwise in host memory.
        """
        found = {p: p.data for p in parameters if p in self._held}
        make_present(found)
        for parameter in found:
            parameter.data = fetched[parameter] if parameter in fetched else self._masters[self._held[parameter]]
        try:
            yield
            casts, values = [self.cast_of(self._held[p]) for p in found], [p.data for p in found]
            if casts:
                torch._foreach_copy_(casts, values)
        finally:
            for parameter, value in found.items():
                parameter.data = value

    def updated_evenly(self, shards: Iterable[FlatShard]) -> None:
        """This rank's pieces of masters have been updated: cast them."""
        for shard in shards:
            assert shard.updated is not None
            if shard.kept is not None:
                shard.kept.copy_(shard.updated)
                continue
            pairs = zip(shard.names, shard.parts, strict=True)
            casts = [self.cast_of(name).view(-1)[slice(*part.span)] for name, part in pairs]
            torch._foreach_copy_(casts, shard.pieces(shard.updated))

    def updates_part(self, parameter: nn.Parameter, low: int, value: Tensor) -> None:
        """Elements of a master from ``low`` on have become these: cast them."""
        name = self._held[parameter]
        self.cast_of(name).view(-1)[low : low + len(value)].copy_(value)

    def updated(self) -> None:
        """All of a step is done: outside of a batch parameters are as they were."""
        if not self._is_computing:
            self.rest()

    def cast_of(self, name: str) -> Tensor:
        """What is computed with, where this rank has it."""
        if name in self._casts:
            return self._casts[name]
        assert self._shards is not None
        return self._shards.cast_of(name)

    def given_out(self, *, is_cast: bool = False) -> dict[str, Tensor]:
        """The casts by canonical name, of this rank's own masters after the optimizer's step (ZeRO-1, ZeRO-2).

        Args:
            is_cast: Whether they are those of the masters already.
        """
        if not is_cast:
            self._cast()
        return self._casts

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
