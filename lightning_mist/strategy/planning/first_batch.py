"""The first batch of training, looked at before training starts and trained all the same.

Lightning makes the training loader's iterator once per fit, in ``FitLoop.setup_data``, which does nothing the second
time it is called. So it is called early, the first item is taken from that iterator and put back in front of it: no
dataset is asked twice. Random generators are as before the look until the loop itself makes its loaders and fetches
the batch; then they are as after that, as if it had been done only then.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.utils._pytree import tree_unflatten

from lightning_mist.errors import MistError, TraceError
from lightning_mist.model.fakes import isolated
from lightning_mist.model.user_code import Generators
from lightning_mist.strategy.all_ranks import everywhere, of_all_ranks
from lightning_mist.strategy.namespace import Namespace
from lightning_mist.strategy.planning.decision import PlannedStep
from lightning_mist.strategy.planning.manual_step import manual_exclusions, rehearse
from lightning_mist.strategy.planning.plain_parallelism import at_once_reason
from lightning_mist.strategy.training import check_same_samples, digest_of


class PutBack:
    """An iterator with what was taken from it in front again; everything else is the iterator's own."""

    def __init__(self, taken: list[Any], rest: Any, on_fetch: Callable[[], None]) -> None:
        self._taken, self._rest = taken, rest
        self._on_fetch: Callable[[], None] | None = on_fetch

    def __iter__(self) -> "PutBack":
        return self

    def __next__(self) -> Any:
        if self._on_fetch is not None:
            on_fetch, self._on_fetch = self._on_fetch, None
            on_fetch()
        return self._taken.pop(0) if self._taken else next(self._rest)

    def __len__(self) -> int:
        return len(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)


def first_batch(trainer: Any, set_epoch: Callable[[Any, int], None]) -> Any:
    """The first batch of this rank's own training loader as the loader gave it; it is still to come in training.

    Every rank calls this at the same time. It is not to be changed.

    Raises:
        TraceError: If there is no training batch.
    """
    loop = trainer.fit_loop
    states = [Generators()]
    _set_up(loop, trainer)
    states.append(Generators())
    loader, fetcher = loop._combined_loader, loop._data_fetcher
    if loader is None:
        raise TraceError(
            "there is no training batch to plan with (limit_train_batches=0 or an empty loader): give a loader with at "
            "least one batch"
        )
    for item in loader.flattened:
        set_epoch(item, _first_epoch(trainer))
    ahead = list(getattr(fetcher, "batches", ()))
    iterator = loader._iterator
    try:
        # Of a loader without a length the fetcher has taken the first batches already.
        item = None if ahead else next(iterator, None)
    finally:
        states.append(Generators())
        _when_set_up(loop, lambda: _go_on(states[0], states[1]))
        states[0].restore()
    taken = [] if item is None else [item]
    loader._iterator = PutBack(taken, iterator, lambda: _go_on(states[1], states[2]))
    if ahead:
        return ahead[0][0]
    if not taken:
        raise TraceError("the training loader gave no batch on this rank: give a loader with at least one batch")
    # The iterator gives one item of every loader; the combined loader puts them together.
    return tree_unflatten(taken[0][0], loader._spec)


def _go_on(before: Generators, after: Generators) -> None:
    """Draw now what was drawn in the look, unless hooks have drawn in between: then that cannot be told from here."""
    if before == Generators():
        after.restore()


def _when_set_up(loop: Any, work: Callable[[], None]) -> None:
    """Do something where the loop itself would make its loaders, once."""

    def setup_data() -> None:
        del loop.__dict__["setup_data"]
        loop._combined_loader_states_to_load = []  # given to the loader in _set_up already
        work()
        loop.setup_data()

    loop.__dict__["setup_data"] = setup_data


def forget_first_batch(trainer: Any) -> None:
    """Let the fit loop make its loaders anew."""
    loop = trainer.fit_loop
    loop.__dict__.pop("setup_data", None)
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        # Left in place it would be torn down again if planning fails, which raises and hides what failed.
        loop._data_fetcher = None
    loop._combined_loader = None


def _saved_loop(trainer: Any) -> dict[str, Any]:
    """The fit loop's part of the checkpoint that training goes on from; empty without one."""
    loaded = getattr(trainer._checkpoint_connector, "_loaded_checkpoint", None) or {}
    saved: dict[str, Any] = loaded.get("loops", {}).get("fit_loop", {})
    return saved


def _first_epoch(trainer: Any) -> int:
    loop, saved = trainer.fit_loop, _saved_loop(trainer)
    if not saved:
        return int(loop.epoch_progress.current.processed)
    # Saved in the last batch of an epoch, before its end was counted: the loop counts it when it restarts.
    is_over = saved.get("epoch_loop.batch_progress", {}).get("is_last_batch", False)
    is_within = _goes_on_within_an_epoch(loop, saved)
    return int(saved["epoch_progress"]["current"]["processed"]) + bool(is_within and is_over)


def _set_up(loop: Any, trainer: Any) -> None:
    """Make the loaders and their iterator; a loader with a state of its own gets that of the checkpoint first."""
    saved = _saved_loop(trainer)
    states = saved.get("state_dict", {}).get("combined_loader", [])
    if not states or not _goes_on_within_an_epoch(loop, saved):
        loop.setup_data()
        return
    restarting = loop._restarting
    loop._restarting, loop._combined_loader_states_to_load = True, states
    try:
        loop.setup_data()
    finally:
        loop._restarting = restarting


def _goes_on_within_an_epoch(loop: Any, saved: dict[str, Any]) -> bool:
    """Whether the loop will take itself for restarting, which is when it restores the states of loaders."""
    progress = saved["epoch_progress"]["current"]
    is_unfinished = any(progress[name] != progress["processed"] for name in ("ready", "started"))
    return is_unfinished or bool(loop._iteration_based_training())


def _copied(batch: Any) -> Any:
    """A copy, which the step may change.

    Raises:
        TraceError: If it holds what cannot be copied.
    """
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # whatever the classes of its members make of it
        raise TraceError(
            f"the first batch cannot be copied ({type(error).__name__}: {error}), and is tried before it is trained: "
            "give batches without generators, open files and tensors that have a graph"
        ) from error


def on_device(trainer: Any, strategy: Any, batch: Any) -> Any:
    """A copy of a batch as the step gets it: converted, through the module's transfer hooks, on the device."""
    batch = strategy.precision_plugin.convert_input(_copied(batch))
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


def look_at_first_batch(trainer: Any, strategy: Any, names: Namespace) -> Any:
    """The first batch as the step gets it, on every rank at once; training will get it from the loader all the same."""

    def look() -> Any:
        try:
            batch = first_batch(trainer, names.set_sampler_epoch)
        except MistError:
            raise
        except Exception as error:
            forget_first_batch(trainer)  # so that training meets the same error, if it is one there
            raise TraceError(
                f"the first batch could not be had: {type(error).__name__}: {error}. A plan is made for it: see that "
                "the loader gives it"
            ) from error
        with isolated(strategy.lightning_module):
            return on_device(trainer, strategy, batch)

    return everywhere(look)


def step_of_fit(trainer: Any, strategy: Any, names: Namespace, *, plain: str | None) -> PlannedStep:
    """``training_step`` of the module that a trainer fits, with the first batch of its loaders.

    Args:
        plain: Why only plain data parallelism is possible, if so.
    """
    module = strategy.lightning_module
    is_automatic = module.automatic_optimization
    calls: list[Callable[[Any], Any]] = []

    def batch() -> Any:
        call = step_function(module, names, strategy.precision_plugin.train_step_context)
        calls.append(call if is_automatic else partial(rehearse, trainer, strategy, call))
        return look_at_first_batch(trainer, strategy, names)

    return PlannedStep(
        name="training_step",
        call=lambda part: calls[-1](part),  # noqa: PLW0108  # made later
        batch=batch,
        # Where the module steps by itself a limit of memory is held against nothing.
        at_once=at_once_reason(trainer) if is_automatic else plain,
        records_metrics=True,
        restrictions=tuple if is_automatic else partial(manual_exclusions, module),
        hint="; a project that looks for 'ddp' in the strategy's name shares out its data under strategy=\"ddp_mist\"",
    )


def load_the_same(batch: Any, loaders: int) -> bool:
    """Whether all of several loaders have given equal batches; called on all ranks at once.

    Raises:
        PlanError: If ranks that share a loader have loaded different ones.
    """
    digests = of_all_ranks(digest_of(batch))
    size = len(digests) // loaders
    for first in range(0, len(digests), size) if size > 1 else ():
        check_same_samples(digests[first : first + size], range(first, first + size), loaders)
    return loaders > 1 and digests[0] is not None and len(set(digests)) == 1
