"""What Fabric asks a strategy for when it saves and loads."""

from typing import Any

from torch import nn

from lightning_mist.strategy.fabric.loop_training import LoopTraining
from lightning_mist.strategy.fabric.planned_module import PlannedModule
from lightning_mist.strategy.training import module_state


class LoopCheckpoints(LoopTraining):
    """The part of a strategy that saves and loads as DDP does, whatever the plan; on every rank at once."""

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """All weights in the module's own layout; complete on global rank 0."""
        plain = module.module if isinstance(module, PlannedModule) else module
        if self._engine is None or plain is not self._engine.module:
            return plain.state_dict()
        return module_state(plain, self._engine)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Take weights in the module's own layout."""
        plain, engine = module.module if isinstance(module, PlannedModule) else module, self._engine
        if engine is None or plain is not engine.module or engine.is_filled:
            plain.load_state_dict(state_dict, strict=strict)
            return
        engine.forget_batch()
        engine.fill()
        plain.load_state_dict(state_dict, strict=strict)
        engine.hollow()

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All optimizer state in DDP's layout; complete on global rank 0."""
        if self._engine is None or optimizer is not self.optimizers[0]:
            state: dict[str, Any] = super().get_optimizer_state(optimizer)
            return state
        return self._engine.optimizer_state()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None, **more: Any
    ) -> dict[str, Any]:
        """Read a checkpoint; of an optimizer's state each rank takes its part."""
        engine, given = self._engine, () if weights_only is None else (weights_only,)  # which Lightning knows since 2.6
        is_ours = engine is not None and isinstance(state, (dict, type(self.optimizers[0])))
        if not is_ours:
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, *given, **more)
            return found
        assert engine is not None
        optimizer = self.optimizers[0]
        if state is optimizer:
            engine.load_optimizer_state(super().load_checkpoint(path, None, strict, *given, **more))
            return {}
        own = [name for name, value in state.items() if value is optimizer]
        rest = {name: value for name, value in state.items() if name not in own}
        remainder: dict[str, Any] = super().load_checkpoint(path, rest, strict, *given, **more)
        state.update(rest)
        for name in own:
            if name in remainder:
                engine.load_optimizer_state(remainder.pop(name))
            elif strict:
                raise KeyError(
                    f"the checkpoint has no {name!r}, which is to be loaded: it has what it was saved with; leave it "
                    "out, or pass strict=False"
                )
        return remainder
