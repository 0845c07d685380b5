"""Gradients under ZeRO-2 and ZeRO-3: reduced to their owners unit by unit, after every backward of a microbatch.

Behind the backward of a unit its gradients leave for their owners while the next unit computes; when that one's are
ready the first have arrived, so that at most the gradients of one unit are under way. Owners add up what arrives; other
ranks keep no gradient. Every rank contributes a fixed set of parameters in a fixed order, whatever got a gradient: a
missing one counts as zeros, and one number per parameter says how many ranks had one.

Under hybrid sharding each shard group does this for itself. Once a batch, at its end, the owners of all groups sum what
they have added up.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_mist.devices import read
from lightning_mist.errors import ScheduleError
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.offload import OffloadedGradients
from lightning_mist.runtime.parameters import Bucket, UnitKey, gradient_dtype, owned_buckets
from lightning_mist.schedule.stage_units import ShardUnit


@dataclass(slots=True)
class _Sum:
    """What the owner of a bucket has received so far."""

    flat: Tensor | None = None
    present: list[bool] = field(default_factory=list)

    def add(self, flat: Tensor, present: list[bool], dtype: torch.dtype) -> None:
        if self.flat is None:
            self.flat, self.present = flat.to(dtype), present
        else:
            self.flat += flat
            self.present = [one or other for one, other in zip(self.present, present, strict=True)]


class UnitGradients:
    """Sums of the gradients of a rank's units."""

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, ShardUnit],
        transport: Transport,
        offloaded: OffloadedGradients | None = None,
    ) -> None:
        self._mesh, self._transport, self._offloaded = mesh, transport, offloaded
        names = frozenset[str]() if offloaded is None else offloaded.names
        self._group = tuple(sorted(mesh.shard_peers))
        self._replicates = tuple(sorted(mesh.replicate_peers))
        owners = {item.name: item.owner(mesh.stage) for item in mesh.held}
        self._of = {key: owned_buckets(unit.reduced, parameters, owners, apart=names) for key, unit in units.items()}
        self._under_way: list[tuple[Bucket, Tensor, list[bool], Work]] = []
        self._sums: dict[int, tuple[Bucket, _Sum]] = {}

    def keep_layouts(self) -> None:
        """Remember the shapes and strides of the parameters, which are about to lose their memory."""
        self._of = {key: [bucket.with_layouts() for bucket in buckets] for key, buckets in self._of.items()}

    def reduce(self, key: UnitKey) -> None:
        """Start to reduce a unit's gradients, which the parameters lose, once those before have arrived."""
        self.settle()
        for bucket in self._of[key]:
            scale = 1.0 / self._mesh.plan.num_loaders
            flat, present = bucket.take_gradients(scale=scale, ranks=len(self._group))
            assert bucket.owner is not None
            work = self._transport.reduce(flat, self._mesh.shard_peers[bucket.owner], self._group)
            self._under_way.append((bucket, flat, present, work))

    @contextmanager
    def as_they_come(self) -> Iterator[None]:
        """Around a backward of which nothing is known before: a unit is reduced when all its gradients have come.

        Units leave in the reverse of their order, the same on every rank. Those of which a parameter gets no gradient
        leave when the backward is over, and so do all behind them.
        """
        left, missing = list(reversed(self._of)), dict[UnitKey, set[nn.Parameter]]()

        def came(parameter: nn.Parameter) -> None:
            for waiting in missing.values():
                waiting.discard(parameter)
            while left and not missing[left[0]]:
                self.reduce(left.pop(0))

        with ExitStack() as stack:
            for key, buckets in self._of.items():
                missing[key] = {p for bucket in buckets for p in bucket.parameters if p.requires_grad}
                for parameter in missing[key]:
                    hook = parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield
        for key in left:
            self.reduce(key)

    def finish(self) -> Iterator[Work]:
        """Give every owner its gradients: the mean over all ranks' batches.

        A parameter that had no gradient in any microbatch of any rank has none.

        Raises:
            ScheduleError: If a parameter got a gradient after those of its unit were reduced for the last time.
        """
        for *_, work in self._under_way:
            yield work
        self.settle()
        for buckets in self._of.values():
            for bucket in buckets:
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                    if parameter.grad is not None:
                        raise ScheduleError(
                            f"{name} got a gradient after the last reduction of its unit: a parameter's gradient must "
                            "be complete when the backward of the first layer that uses it has run"
                        )
        sums, self._sums = self._sums, {}
        if len(self._replicates) > 1:
            flats = [total.flat for _, total in sums.values()]
            yield from [self._transport.all_reduce(flat, self._replicates) for flat in flats if flat is not None]
        gradients: dict[nn.Parameter, Tensor] = {}
        for bucket, total in sums.values():
            assert total.flat is not None
            # Only an owner that lacks a gradient asks whether another rank had one: asking waits for the device.
            counts = [1.0] * len(total.present) if all(total.present) else read(total.flat[bucket.numel :])
            for parameter, view, count in zip(bucket.parameters, bucket.views(total.flat), counts, strict=True):
                if count > 0:
                    # A parameter that several chunks of this rank use has a sum of each.
                    gradients[parameter] = gradients[parameter].add_(view) if parameter in gradients else view
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def forget(self) -> None:
        """Drop everything, also what is under way."""
        self._under_way.clear()
        self._sums.clear()

    def settle(self) -> None:
        """Wait for what is under way, and add it up where it is owned."""
        for bucket, flat, present, work in self._under_way:
            work.wait()
            if bucket.owner != self._mesh.shard_index:
                continue
            dtype = gradient_dtype(bucket.parameters[0])
            if self._offloaded is None or not self._offloaded.arrived(bucket, flat, present):
                self._sums.setdefault(id(bucket), (bucket, _Sum()))[1].add(flat, present, dtype)
        self._under_way.clear()
