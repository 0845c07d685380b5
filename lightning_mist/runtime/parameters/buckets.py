"""Parameters in flat buffers, so that a few large transfers carry many small tensors."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_mist.devices import read
from lightning_mist.errors import PlanError
from lightning_mist.plan.mesh import Mesh
from lightning_mist.plan.sharding import BUCKET_BYTES, FIRST_BUCKET_BYTES, deal_buckets
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.schedule.stage_program import Key
from lightning_mist.tensors import is_hollow

Begun: TypeAlias = tuple[Work, Callable[[], Tensor | None]]
"""A reduction that has begun, and what gives, when it is complete, what of it is this rank's; None if nothing is."""


class Bucket:
    """Parameters of one dtype on one device that travel together: values from their owner, gradients to it or to all.

    Args:
        items: The parameters with their names.
        alignment: Elements at whose multiples each begins in a flat buffer.

    Attributes:
        owner: Place in a shard group that updates them; None if every rank does.
        mine: Indices of the parameters of which this rank updates something, if it does of any: here of all.
        numel: Elements of a flat buffer of all parameters.
        num_counts: Elements behind the others in a buffer of gradients: for each parameter how many ranks had one.
        layouts: Tensors of their shapes and strides: they themselves, until :meth:`keep_layouts`.
        fresh: Gradients of the batch that runs, or has just run, as far as ranks have reduced them to this one.
        present: Which parameters had a gradient on this rank in that batch.
    """

    def __init__(
        self, items: Sequence[tuple[str, nn.Parameter]], owner: int | None = None, *, alignment: int = 1
    ) -> None:
        self.names, self.parameters = tuple(name for name, _ in items), tuple(parameter for _, parameter in items)
        self.owner, self._alignment = owner, alignment
        self.layouts: Sequence[Tensor] = self.parameters
        self.numel, self.num_counts = padded_numel(self.parameters, alignment), len(self.names)
        self.mine: Sequence[int] = range(len(self.names))
        self.forget()

    def forget(self) -> None:
        """A batch begins, or the one before is of no use."""
        self.fresh: Tensor | None = None
        self.present = [False] * len(self.names)

    def keep_layouts(self) -> None:
        """Remember the shapes and strides that the parameters have now: they are about to lose their memory."""
        self.layouts = tuple(
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in self.parameters
        )

    def is_mine(self, mesh: Mesh) -> bool:
        """Whether a rank updates something of them."""
        return self.owner in (None, mesh.shard_index)

    # A flat buffer ---------------------------------------------------------------------------------------------------

    def buffer(self, dtype: torch.dtype, extra: int = 0) -> Tensor:
        """A flat buffer without values, with ``extra`` elements at its end."""
        return torch.empty(self.numel + extra, dtype=dtype, device=self.parameters[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A view into a flat buffer for each parameter, of its shape and strides."""
        return views_like(flat, self.layouts, alignment=self._alignment)

    def own_of(self, flat: Tensor) -> Tensor:
        """What of a flat buffer, or of that alone, is of what this rank updates, if it does."""
        return flat

    def pieces(self, own: Tensor) -> list[Tensor]:
        """A view for each parameter of what of it this rank updates."""
        return self.views(own)

    def cut(self, index: int, value: Tensor) -> Tensor:
        """What of a parameter's value this rank updates."""
        return value

    def keep(self, own: Tensor, values: Sequence[Tensor]) -> None:
        """Fill this rank's from whole values, in the order of the parameters, as far as these are here."""
        there = [index for index, value in enumerate(values) if not is_hollow(value)]
        cut, pieces = [self.cut(index, values[index]) for index in there], self.pieces(own)
        if there:
            torch._foreach_copy_([pieces[index] for index in there], cut)

    def put(self, own: Tensor, index: int, value: Tensor) -> None:
        """Fill one parameter's place in this rank's from its whole value."""
        self.pieces(own)[index].copy_(self.cut(index, value))

    # Values ----------------------------------------------------------------------------------------------------------

    def computed_with(self, casts: Mapping[str, Tensor]) -> list[Tensor]:
        """What is computed with: casts of the parameters where there are any, or they."""
        return [casts.get(name, p.detach()) for name, p in zip(self.names, self.parameters, strict=True)]

    def gather(self, flat: Tensor, mesh: Mesh, transport: Transport) -> Work:
        """Begin to give every rank of a shard group the values in a flat buffer of who updates them."""
        assert self.owner is not None
        return transport.broadcast(flat, mesh.shard_peers[self.owner], tuple(sorted(mesh.shard_peers)))

    def give_out(
        self, computed: Mapping[str, Tensor], mesh: Mesh, transport: Transport
    ) -> tuple[Work, Callable[[], None]]:
        """After an update: give every rank of a group what it computes with, and what is to be done behind that.

        Args:
            computed: That by canonical name, where it is another tensor than the parameter.
        """
        values = self.computed_with(computed)
        flat = self.buffer(values[0].dtype)
        views = views_like(flat, values)
        mine, others = (self.mine, ()) if self.is_mine(mesh) else ((), self.mine)
        copy_some(views, values, mine)
        return self.gather(flat, mesh, transport), partial(copy_some, values, views, others)

    # Gradients -------------------------------------------------------------------------------------------------------

    def begin(self, mesh: Mesh, transport: Transport) -> Begun:
        """Begin to reduce the parameters' gradients, which they lose, to the mean over all ranks' batches.

        Raises:
            PlanError: If a gradient is not dense.
        """
        check_dense(self, len(mesh.shard_peers))
        flat = self.buffer(self.parameters[0].dtype, self.num_counts)
        self.mark(flat, self._move_gradients(flat, 1.0 / mesh.plan.num_loaders))
        return self.reduce(flat, mesh, transport)

    def _move_gradients(self, flat: Tensor, scale: float) -> list[bool]:
        """Move gradients, times ``scale``, into a buffer, zeros where there are none; nobody has them behind that.

        Returns:
            Which there were.
        """
        views, gradients = self.views(flat), [parameter.grad for parameter in self.parameters]
        for gradient, view in zip(gradients, views, strict=True):
            if gradient is None:
                view.zero_()
        pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        is_cast = any(gradient.dtype is not flat.dtype for _, gradient in pairs)
        if is_cast:
            # Rounded once: scaled in the type in which they were added up, and then cast.
            torch._foreach_mul_([gradient for _, gradient in pairs], scale)
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        if not is_cast:
            flat[: self.numel].mul_(scale)
        for parameter in self.parameters:
            parameter.grad = None
        return [gradient is not None for gradient in gradients]

    def mark(self, flat: Tensor, had: Sequence[bool]) -> None:
        """Say of a buffer of gradients which there are: the others are zeros in it."""
        self.present = either(self.present, had)
        flags = flat[self.numel :].fill_(1.0)
        for index, is_present in enumerate(had):
            if not is_present:
                flags[index] = 0.0

    def reduce(self, flat: Tensor, mesh: Mesh, transport: Transport) -> Begun:
        """Begin to add up a buffer of gradients over a shard group."""
        group, is_mine = tuple(sorted(mesh.shard_peers)), self.is_mine(mesh)
        if self.owner is None:
            return transport.all_reduce(flat, group), lambda: flat
        return transport.reduce(flat, mesh.shard_peers[self.owner], group), lambda: flat if is_mine else None

    def add(self, reduced: Tensor) -> None:
        """Add what ranks have reduced to this one."""
        if self.fresh is None:
            self.fresh = reduced.to(gradient_dtype(self.parameters[0]))
        else:
            self.fresh += reduced

    def install(self) -> None:
        """Give parameters their gradients; one that several chunks of this rank use has a sum of each."""
        flat, present = self.fresh, self.present
        self.forget()
        if flat is None:
            return
        # Only a rank that lacks a gradient asks whether another had one: asking waits for the device.
        counts = [1.0] * len(present) if all(present) else read(flat[self.numel :])
        for parameter, view, count in zip(self.parameters, self.views(flat), counts, strict=True):
            if count != 0:
                parameter.grad = view if parameter.grad is None else parameter.grad.add_(view)


def either(one: Sequence[bool], other: Sequence[bool]) -> list[bool]:
    """Which of some are in one list, or in another."""
    return [a or b for a, b in zip(one, other, strict=True)]


def copy_some(targets: Sequence[Tensor], sources: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Copy those of these indices."""
    if indices:
        torch._foreach_copy_([targets[index] for index in indices], [sources[index] for index in indices])


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter's gradients are added up in."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def owned_buckets(
    units: Mapping[Key, Iterable[str]], parameters: Mapping[str, nn.Parameter], mesh: Mesh, apart: Collection[str] = ()
) -> dict[Key, list[Bucket]]:
    """For each unit buckets of what its ranks update whole, by owner, dtype and device, in the order of the names.

    Args:
        units: Names of parameters; those that are shared out evenly are left out.
        apart: Names that no bucket mixes with others.
    """
    owners = {item.name: item.owner(mesh.stage) if mesh.is_sharded else None for item in mesh.held if not item.is_even}
    found: dict[Key, list[Bucket]] = {}
    for key, names in units.items():
        together: dict[tuple[int | None, bool, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name in names:
            if name in owners:
                p = parameters[name]
                together.setdefault((owners[name], name in apart, p.dtype, p.device), []).append((name, p))
        found[key] = [Bucket(items, owner) for (owner, *_), items in together.items()]
    return found


def check_dense(bucket: Bucket, ranks: int) -> None:
    """Refuse gradients that cannot be put into a flat buffer.

    Args:
        ranks: How many ranks the gradients are reduced over, for the error message.

    Raises:
        PlanError: If a gradient is not dense.
    """
    for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise PlanError(
                f"the gradient of {name} is {parameter.grad.layout}: only dense gradients are reduced over the {ranks} "
                "data-parallel ranks, or offloaded; set sparse=False in its module"
            )


def padded_numel(tensors: Sequence[Tensor], alignment: int) -> int:
    """Elements of a flat buffer in which each of the tensors begins at a multiple of ``alignment`` elements."""
    return sum(-(-tensor.numel() // alignment) * alignment for tensor in tensors)


def views_like(flat: Tensor, tensors: Sequence[Tensor], *, alignment: int = 1) -> list[Tensor]:
    """Consecutive views into a flat buffer, of the tensors' shapes and, where these are dense, their strides.

    Args:
        alignment: Elements at whose multiples the views begin; see :func:`padded_numel`.
    """
    views, start = [], 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        start += padded_numel([tensor], alignment)
        if not tensor.is_contiguous() and _is_dense(tensor):
            # Optimizers with fused kernels want gradients laid out like their parameters (channels last, for example).
            views.append(part.as_strided(tensor.shape, tensor.stride()))
        else:
            views.append(part.view(tensor.shape))
    return views


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter, int | None]],
    *,
    capacity: int = BUCKET_BYTES,
    first_capacity: int = FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Deal parameters into buckets, in their order.

    Args:
        parameters: Name, parameter and owner. Parameters of different owner, dtype or device never share a bucket.
        capacity: Bytes at which a bucket is closed; a larger parameter has a bucket of its own.
        first_capacity: The same for the first bucket that is closed.

    Returns:
        Buckets in the order in which their last parameter comes.
    """
    sizes = [parameter.numel() * parameter.element_size() for _, parameter, _ in parameters]
    keys = [(owner, parameter.dtype, parameter.device) for _, parameter, owner in parameters]
    dealt = deal_buckets(sizes, keys, capacity=capacity, first_capacity=first_capacity)
    return tuple(Bucket([parameters[i][:2] for i in indices], parameters[indices[0]][2]) for indices in dealt)


def _is_dense(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and 0 not in tensor.stride()
