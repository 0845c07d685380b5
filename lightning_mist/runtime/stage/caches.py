"""Training without key-value caches, which nothing reads there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_mist.plan import ModuleMap
from lightning_mist.plan.calls import without_caches


@contextmanager
def no_caches(module: nn.Module, module_map: ModuleMap) -> Iterator[None]:
    """Inside, the blocks of a module get no empty key-value caches while gradients are wanted.

    Models of transformers make such caches by default, and each block then keeps a copy of its keys and values until
    the step has ended. Parts of a cut module never get any; this is for one that runs as a whole.

    Args:
        module: The module.
        module_map: Names its blocks.
    """

    def drop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return without_caches(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    blocks = [module.get_submodule(name) for name in module_map.blocks]
    handles = [block.register_forward_pre_hook(drop, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
