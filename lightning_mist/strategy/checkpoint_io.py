"""Checkpoints in the layout that plain data parallelism and a single process write and read."""

from typing import Any

from torch import nn

from lightning_mist.strategy.training import Engine


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """The module's ``state_dict`` with all values on rank 0; the other ranks' parts stay where they are.

    Names, order, tied entries, buffers and the module's own state-dict hooks are as in the whole module.
    """
    if engine.is_filled:
        return module.state_dict()
    values = engine.module_values()
    with engine.parts_may_leave():
        state = module.state_dict()
    if values:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = values[engine.canonical_name(parameter)]
    return state
