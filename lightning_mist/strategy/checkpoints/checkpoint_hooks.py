"""What Lightning asks a strategy for when it saves and loads checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_mist.model.initialization import load_hollow
from lightning_mist.strategy import empty_parameters
from lightning_mist.strategy.checkpoints.atomic import discard, save_file
from lightning_mist.strategy.plan_installation import PlanInstallation
from lightning_mist.strategy.training import module_state


class Checkpoints(PlanInstallation):
    """The part of a strategy that saves and loads: in the layout of plain data parallelism, under every plan."""

    _state_afterwards: Callable[[], dict[str, Any]] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint so that its name never stands for a part of it."""
        if not self._writes_itself or storage_options is not None or "://" in str(filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            save_file(checkpoint, Path(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, all of it at once."""
        if not self._writes_itself or "://" in str(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            discard(Path(filepath))

    @property
    def _writes_itself(self) -> bool:
        """Whether checkpoints are Lightning's usual files, and not what a user's plugin makes of them."""
        return type(self.checkpoint_io).__name__ == "TorchCheckpointIO"

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; for a module without values its tensors stay in the file until they are needed."""
        module = self.lightning_module
        if module is not None and self._writes_itself and empty_parameters.has_empty_parameters(module):
            content = empty_parameters.mapped_checkpoint(checkpoint_path, weights_only)
            if content is not None:
                return content
        return super().load_checkpoint(checkpoint_path, weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights in DDP's layout; complete on global rank 0."""
        assert self.lightning_module is not None
        if self._engine is None:
            is_elsewhere = self.global_rank > 0 and empty_parameters.has_empty_parameters(self.lightning_module)
            return {} if is_elsewhere else super().lightning_module_state_dict()
        self.refuse_without_the_others("a checkpoint")
        with self.all_take_part():
            return module_state(self.lightning_module, self._engine)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Take weights in DDP's layout, also while training (the learning-rate finder does), on every rank at once."""
        module, engine = self.lightning_module, self._engine
        assert module is not None
        if engine is None and empty_parameters.has_empty_parameters(module):
            load_hollow(module, checkpoint["state_dict"], strict=strict)
        elif engine is None or engine.is_filled:
            super().load_model_state_dict(checkpoint, strict)
        else:
            engine.fill()
            super().load_model_state_dict(checkpoint, strict)
            engine.hollow()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All optimizer state in DDP's layout; complete on global rank 0."""
        if self._engine is not None:
            self.refuse_without_the_others("a checkpoint")
            with self.all_take_part():
                return self._engine.optimizer_state()
        return super().optimizer_state(optimizer) if self._state_afterwards is None else self._state_afterwards()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Take this rank's part of optimizer state in DDP's layout."""
        if self._engine is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._engine.load_optimizer_state(checkpoint["optimizer_states"][0])
