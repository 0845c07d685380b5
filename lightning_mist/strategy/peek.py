"""One real training batch before training starts, without changing what training will see."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_mist.errors import TraceError
from lightning_mist.strategy.logging import recorded_logs
from lightning_mist.strategy.namespace import Namespace


def peek_batch(trainer: Any, strategy: Any) -> Any:
    """The first batch of this rank's own training loader, on its device.

    The loaders are made exactly as the fit loop will make them, one batch is taken, and everything is put back: random
    state is the caller's to isolate, and ``train_dataloader`` is called once more when training starts.

    Raises:
        TraceError: If there is no training batch.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    if loop._combined_loader is None:
        raise TraceError(
            "there is no training batch to plan with (limit_train_batches=0 or an empty loader): give a loader with at "
            "least one batch"
        )
    try:
        batch = next(iter(loop._combined_loader))[0]
    except StopIteration:
        raise TraceError(
            "the training loader gave no batch on this rank: give a loader with at least one batch"
        ) from None
    finally:
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()
            # Left in place it would be torn down again if planning fails, which raises and hides what failed.
            loop._data_fetcher = None
        loop._combined_loader = None
    batch = strategy.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return strategy.batch_to_device(batch, dataloader_idx=0)


def step_function(
    module: Any, names: Namespace, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[Any], Any]:
    """``training_step`` of a module as a function of the batch alone, inside the precision plugin's context."""
    takes_index = names.is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise TraceError(
            "training_step takes dataloader_iter: it must take a batch for its work to be divided; take (batch, "
            "batch_idx) instead"
        )

    def call(batch: Any) -> Any:
        with context():
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)

    return call


@contextmanager
def silent(module: Any) -> Iterator[None]:
    """Inside, the module's ``log`` and ``log_dict`` lead nowhere."""
    with recorded_logs(module):
        yield
