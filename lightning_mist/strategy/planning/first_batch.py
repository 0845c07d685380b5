"""The first batch of training, looked at before training starts and trained all the same.

Lightning makes the training loader's iterator in ``FitLoop.setup_data``, which does nothing the second time it is
called, and another one where training goes on at the beginning of an epoch. So they are made early, the first item is
taken from the last and put back in front of it: no dataset is asked twice. Random generators are as before the look
until the loop itself makes its loaders and iterators and fetches the batch; then they are as after that, as if it had
been done only then. How training goes on from a checkpoint Lightning's loops say themselves, by their own rules.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_unflatten

from lightning_mist.attributes import StandIn, replaced
from lightning_mist.errors import MistError, TraceError
from lightning_mist.model.fakes import isolated
from lightning_mist.model.user_code import Generators, is_users
from lightning_mist.plan import Exclusion, Feature
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.strategy.given_arguments import Namespace
from lightning_mist.strategy.planning.decision import PlannedStep
from lightning_mist.strategy.planning.plain_parallelism import MANUAL, at_once_reason
from lightning_mist.strategy.ranks import everywhere, of_all_ranks
from lightning_mist.strategy.training import NOT_AVERAGED, check_same_samples, digest_of
from lightning_mist.strategy.user_code import GRADIENTS_AWAY, PARAMETERS_AWAY, STATE_AWAY, read_in_step
from lightning_mist.tensors import copy_batch


class PutBack(StandIn):
    """An iterator with what was taken from it in front again; everything else is the iterator's own."""

    def __init__(self, taken: list[Any], rest: Any, on_fetch: Callable[[], None]) -> None:
        self._taken, self.inner = taken, rest
        self._on_fetch: Callable[[], None] | None = on_fetch

    def __iter__(self) -> "PutBack":
        return self

    def __next__(self) -> Any:
        if self._on_fetch is not None:
            on_fetch, self._on_fetch = self._on_fetch, None
            on_fetch()
        return self._taken.pop(0) if self._taken else next(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class _Iterated(StandIn):
    """A loader for its fetcher, which asks it for iterators where they are there already."""

    def __init__(self, loader: Any, fetcher: Any, iterators: list[Callable[[], None]]) -> None:
        self.inner, self._fetcher, self._iterators = loader, fetcher, iterators

    def __iter__(self) -> Any:
        self._iterators.pop(0)()
        if not self._iterators:
            self._fetcher._combined_loader = self.inner
        return self.inner  # which is its own iterator


class _Asked:
    """A fetcher that notes whether it is asked for an iterator, and does nothing."""

    is_asked, fetched = False, 0

    def __iter__(self) -> Iterator[Any]:
        self.is_asked = True
        return iter(())


def first_batch(trainer: Any, set_epoch: Callable[[Any, int], None]) -> Any:
    """The first batch of this rank's own training loader as the loader gave it; it is still to come in training.

    Every rank calls this at the same time, its loops restored. It is not to be changed.

    Raises:
        TraceError: If there is no training batch.
    """
    loop, start = trainer.fit_loop, Generators()
    try:
        loop.setup_data()
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        if loader is None:
            raise TraceError(
                "there is no training batch to plan with (limit_train_batches=0 or an empty loader): give a loader "
                "with at least one batch"
            )
        vars(loop)["setup_data"] = partial(_set_up, loop, partial(start.follow, Generators()))
        vars(loader).pop("_state_dicts", None)  # where an earlier fit has ended before its first batch
        epoch, is_anew = _beginning(trainer)
        for part in loader.flattened:
            set_epoch(part, epoch)
        # Of a loader without a length the fetcher has taken the first batches already.
        if not is_anew and (ahead := getattr(fetcher, "batches", ())):
            return ahead[0][0]
        iterators, item = _iterators(loader, set_epoch, epoch, is_anew=is_anew)
    finally:
        start.restore()
    iterators.pop(0)()
    if iterators:
        fetcher._combined_loader = _Iterated(loader, fetcher, iterators)
    if item is None:
        raise TraceError("the training loader gave no batch on this rank: give a loader with at least one batch")
    # The iterator gives one item of every loader; the combined loader puts them together.
    return tree_unflatten(item[0], loader._spec)


def _iterators(
    loader: Any, set_epoch: Callable[[Any, int], None], epoch: int, *, is_anew: bool
) -> tuple[list[Callable[[], None]], Any]:
    """What gives the loader the iterators that the loop asks for until it gets an item, one by one; and that item."""
    before, iterators = Generators(), list[Callable[[], None]]()
    on_iterate: Callable[[], None] | None = None
    while True:
        iterator, states = loader._iterator, copy.deepcopy(loader._state_dicts())
        item = None if is_anew and not iterators else next(iterator, None)
        iterators.append(
            partial(_give, loader, iterator, item, states, on_iterate, partial(before.follow, Generators()))
        )
        if item is not None or len(iterators) == 3:
            return iterators, item
        if not is_anew or len(iterators) > 1:
            # A loader that goes on where an epoch has ended has nothing left of it, and gives nothing or the next.
            epoch += 1
            for part in loader.flattened:
                set_epoch(part, epoch)
        after = Generators()
        iter(loader)
        before = Generators()
        on_iterate = partial(after.follow, before)


def _give(loader: Any, iterator: Any, item: Any, states: Any, on_iterate: Any, on_fetch: Callable[[], None]) -> None:
    """Let a loader have an iterator with its first item in front, and until that is fetched the states before it."""
    if on_iterate is not None:
        on_iterate()
    loader._iterator = PutBack([] if item is None else [item], iterator, partial(_fetch, loader, on_fetch))
    vars(loader)["_state_dicts"] = partial(copy.copy, states)


def _fetch(loader: Any, on_fetch: Callable[[], None]) -> None:
    on_fetch()
    vars(loader).pop("_state_dicts", None)


def _set_up(loop: Any, work: Callable[[], None]) -> None:
    """Do something where the loop itself would make its loaders, once."""
    del loop.__dict__["setup_data"]
    loop._combined_loader_states_to_load = []  # given to the loader in the look already
    work()
    loop.setup_data()


def forget_first_batch(trainer: Any) -> None:
    """Let the fit loop make its loaders anew."""
    loop = trainer.fit_loop
    loop.__dict__.pop("setup_data", None)
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        # Left in place it would be torn down again if planning fails, which raises and hides what failed.
        loop._data_fetcher = None
    loop._combined_loader = None


def _beginning(trainer: Any) -> tuple[int, bool]:
    """Which epoch the first batch is of, and whether the loop makes another iterator before it comes to that.

    What a loop makes of its progress when it begins is its own affair, and another in each version of Lightning. So one
    begins, on a copy of the progress.
    """
    twin, fetcher = _with_own_progress(trainer.fit_loop), _Asked()
    epochs, batches = twin.epoch_progress.current, twin.epoch_loop
    with replaced(trainer, fit_loop=twin):
        twin.reset()
        if not twin._iteration_based_training():
            epochs.completed = epochs.processed  # as on_run_start does, which calls hooks
        batches.reset()
        batches.on_run_start(fetcher)
        # A restarted loop that is at the end of an epoch fetches all the same, unless a validation is to be done, or
        # not to be done again.
        is_over = batches._is_training_done and (
            not batches.restarting
            or (
                batches._should_check_val_fx(fetcher)
                and (getattr(batches, "restarted_on_last", True) or batches.val_loop.restarted_mid_evaluation)
            )
        )
    return int(epochs.processed) + is_over, fetcher.is_asked or is_over


def _with_own_progress(loop: Any) -> Any:
    """A copy of a loop and of the loops in it, which counts for itself."""
    twin = copy.copy(loop)
    for name, value in vars(loop).items():
        if hasattr(value, "reset_on_restart"):
            vars(twin)[name] = copy.deepcopy(value)
        elif hasattr(value, "restarting"):
            vars(twin)[name] = _with_own_progress(value)
    return twin


def _copied(batch: Any) -> Any:
    """A copy, which the step may change.

    Raises:
        TraceError: If it holds what cannot be copied.
    """
    try:
        return copy_batch(batch, with_tensors=True)
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
        batch = copy_batch(batch)  # from which the step may take what another trial needs
        with context():
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)

    return call


def look_at_first_batch(trainer: Any, strategy: Any, names: Namespace) -> Any:
    """The first batch as the step gets it, on every rank at once; training will get it from the loader all the same."""
    trainer._checkpoint_connector.restore_loops()  # as Lightning will again: until then training is where it goes on

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


def _run_hooks(trainer: Any, module: Any, batch: Any) -> None:
    """Run the user's hooks that come before each step, as Lightning does.

    Not those that come once a fit or an epoch: what they ask of services and files would be asked for twice.
    """
    for callback in trainer.callbacks:
        if is_users(type(callback)):
            callback.on_train_batch_start(trainer, module, batch, 0)
    module.on_train_batch_start(batch, 0)


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
        prepare=partial(_run_hooks, trainer, module),
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


# Steps that call backward and step their optimizers themselves ----------------------------------------------------

BUT_MANUAL: tuple[Feature, ...] = (
    *(*PARAMETERS_AWAY, "offloaded_gradients", "offloaded_activations"),
    *("microbatches", "sequence", "context", "even_shards"),
)
"""What needs to know a step's forward and its one backward apart."""


def rehearse(trainer: Any, strategy: Any, call: Callable[[Any], Any], batch: Any) -> Any:
    """Run a manual step on a batch without its backwards and updates; gives the sum of the losses that it has.

    Raises:
        TraceError: If it asks for gradients that are not averaged.
    """
    losses: list[Tensor] = []

    def backward(loss: Tensor, *_: Any, **__: Any) -> Tensor:
        losses.append(loss if loss.ndim == 0 else loss.sum())
        return loss

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        return closure()

    def block_backward_sync() -> Any:
        raise TraceError(NOT_AVERAGED)

    instead = {"backward": backward, "optimizer_step": optimizer_step, "block_backward_sync": block_backward_sync}
    # Torch's clipping by value expects that there is a gradient; by norm it does not.
    grouped = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    grouping = replaced(clip_grad, _group_tensors_by_device_and_dtype=lambda kinds: grouped(kinds) if kinds[0] else {})
    with _unchanged(trainer), grouping:
        vars(strategy).update(instead)
        try:
            output = call(batch)
        finally:
            for name in instead:
                del vars(strategy)[name]
    return sum(losses[1:], losses[0]) if losses else output


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Inside, optimizers have no parameters; what a step changes of them and of schedulers is undone."""
    optimizers = trainer.strategy.optimizers
    schedulers = [item.scheduler for item in trainer.strategy.lr_scheduler_configs]
    groups = [(group, dict(group)) for item in optimizers for group in item.param_groups]
    states = [(item, deepcopy(item.state_dict())) for item in schedulers]
    called = [(item, getattr(item, "_opt_called", False)) for item in optimizers]
    for group, _ in groups:
        # Whoever clears or switches off gradients would else be seen to use parameters from outside of their modules.
        group["params"] = []
    for item in optimizers:
        item._opt_called = True  # or schedulers warn that they are stepped first
    try:
        yield
    finally:
        for item, was_called in called:
            item._opt_called = was_called
        for item, state in states:
            item.load_state_dict(state)
        for group, before in groups:
            group.update(before)


def manual_exclusions(module: Any) -> tuple[Exclusion, ...]:
    """What a manual step rules out: what needs its forward and backward apart, and what its code looks at."""
    reasons = [(MANUAL, BUT_MANUAL)]
    found = read_in_step(module)
    if found is not None:
        whole, name, place = found
        reason = f"training_step may look at {whole} ({name} in {place}), which would not all be on every rank"
        reasons.append((reason, GRADIENTS_AWAY if whole == "gradients" else STATE_AWAY))
    return exclusions_of(reasons)
