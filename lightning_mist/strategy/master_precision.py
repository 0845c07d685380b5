"""Master weights under Lightning: which precisions have them, and where they are before training begins."""

from typing import Any

from torch import Tensor, nn

from lightning_mist.errors import PlanError
from lightning_mist.model import MASTERS_PRECISION
from lightning_mist.runtime.parameters import check_gradient_types


def check_master_weights(precision: str, *, has_values: bool) -> None:
    """Refuse master weights where they have no meaning, or cannot be had.

    Args:
        has_values: Whether all parameters have values.

    Raises:
        PlanError: Naming what to ask for instead.
    """
    if precision != MASTERS_PRECISION:
        also = ", whose gradients would have to be scaled" if precision == "16-true" else ""
        mixed = ", whose parameters are their own masters" if precision.endswith("-mixed") else ""
        raise PlanError(
            f"master_weights=True with precision={precision!r}{also}{mixed}: masters are for parameters that are "
            f"computed with in bfloat16; use precision={MASTERS_PRECISION!r}, or master_weights=False"
        )
    check_gradient_types()
    if not has_values:
        raise PlanError(
            "master_weights=True with parameters without values (made with empty_init, on the meta device, or larger "
            "than a device): masters are taken from values that every rank has; build the module with values, raise "
            "memory_limit, or use precision='bf16-mixed'"
        )


def take_masters(module: nn.Module, plugin: Any) -> dict[str, Tensor]:
    """The values of trained parameters in 32 bits, by canonical name; the module is converted to its precision."""
    masters = {
        name: parameter.data.float()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    plugin.convert_module(module)
    return masters


def refuse_plain(reason: str | None) -> None:
    """Refuse master weights where only torch's own data parallelism could train, for a reason."""
    if reason is None:
        return
    raise PlanError(
        f"master_weights=True: {reason}, so only torch's DistributedDataParallel could train this, which keeps no "
        f"masters; change that, or use precision='bf16-mixed' without master_weights"
    )
