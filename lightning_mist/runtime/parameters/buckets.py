"""Parameters in flat buffers, so that a few large transfers carry many small tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.plan.sharding import BUCKET_BYTES, FIRST_BUCKET_BYTES, deal_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one dtype on one device that travel together.

    Attributes:
        owner: Data-parallel index that owns them; None if every rank updates them.
        layouts: For each parameter a tensor without memory, of its shape and strides; empty where the parameters
            themselves always have memory to show them.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    owner: int | None = None
    layouts: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, items: Sequence[tuple[str, nn.Parameter]], owner: int | None = None) -> "Bucket":
        """A bucket of parameters, given with their names."""
        return cls(
            names=tuple(name for name, _ in items), parameters=tuple(parameter for _, parameter in items), owner=owner
        )

    def with_layouts(self) -> "Bucket":
        """The same bucket, which remembers the shapes and strides that its parameters have now."""
        layouts = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta") for p in self.parameters]
        return replace(self, layouts=tuple(layouts))

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def empty(self, *, extra: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """A flat buffer for the parameters, with ``extra`` elements at its end; by default of their type."""
        first = self.parameters[0]
        return torch.empty(self.numel + extra, dtype=dtype or first.dtype, device=first.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A view into a flat buffer for each parameter, of its shape and strides."""
        return views_like(flat, self.layouts or self.parameters)

    def move_gradients(self, views: Sequence[Tensor], flat: Tensor, *, scale: float, ranks: int) -> list[bool]:
        """Move the parameters' gradients, times ``scale``, into views of a flat buffer, and zeros where there are none.

        Returns:
            Which parameters had a gradient. None has one afterwards.

        Raises:
            PlanError: If a gradient is not dense.
        """
        check_dense(self, ranks)
        gradients = [parameter.grad for parameter in self.parameters]
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
            flat.mul_(scale)
        for parameter in self.parameters:
            parameter.grad = None
        return [gradient is not None for gradient in gradients]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter's gradients are added up in."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def owned_buckets(
    names: Iterable[str],
    parameters: Mapping[str, nn.Parameter],
    owners: Mapping[str, int | None],
    *,
    apart: Collection[str] = (),
) -> list[Bucket]:
    """Buckets of parameters by owner, dtype and device, in their order; none mixes those ``apart`` with others."""
    together: dict[tuple[int | None, bool, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name in names:
        p = parameters[name]
        together.setdefault((owners[name], name in apart, p.dtype, p.device), []).append((name, p))
    return [Bucket.of(items, owner) for (owner, *_), items in together.items()]


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
    return tuple(Bucket.of([parameters[i][:2] for i in indices], parameters[indices[0]][2]) for indices in dealt)


def _is_dense(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and 0 not in tensor.stride()
