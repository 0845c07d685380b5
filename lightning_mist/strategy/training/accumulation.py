"""Whether gradients of earlier batches are still wanted when a batch is run."""

from typing import Any


def gradients_are_about_to_go(module: Any) -> bool:
    """Whether Lightning clears a module's gradients right after this step, and nobody looks at them before that."""
    trainer = module.trainer
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_idx % trainer.accumulate_grad_batches != 0:
        return False
    watching = [module, *trainer.callbacks]
    hooks = [getattr(type(item), "on_before_zero_grad", None) for item in watching]
    own = getattr(type(module), "optimizer_zero_grad", None)
    return all(_is_lightnings(hook) for hook in [*hooks, own])


def _is_lightnings(function: Any) -> bool:
    """Whether a hook is Lightning's own, which does nothing but the default."""
    return getattr(function, "__module__", "").partition(".")[0] in ("lightning", "pytorch_lightning")
