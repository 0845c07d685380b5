"""Gradient clipping and loss scaling that see the whole model, on whatever precision plugin the user chose.

The plugin object keeps its identity and the name of its class, because checkpoints store the plugin's state under that
name; only its class is replaced by a subclass whose clipping asks the engine.
"""

from typing import Any

from lightning_mist.strategy.engine import Engine


class _Clipping:
    """Clipping over all stages and shards; mixed into the plugin's class."""

    _mist_engine: Engine | None

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self._mist_engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]
        else:
            self._mist_engine.clip_by_norm(optimizer, clip_val)


class _AgreeingScaler:
    """Every rank skips a step if any rank saw a gradient that is not finite; mixed into the scaler's class."""

    _mist_engine: Engine | None

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)  # type: ignore[misc]
        return found if self._mist_engine is None else self._mist_engine.agree_on_overflow(found)


def _extend(instance: Any, mixin: type) -> None:
    cls = type(instance)
    if not issubclass(cls, mixin):
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        instance.__class__ = type(cls.__name__, (mixin, cls), names)


def attach_engine(plugin: Any, engine: Engine | None) -> None:
    """Let a precision plugin (and its gradient scaler) work for an engine, or for none again."""
    if engine is None and not isinstance(plugin, _Clipping):
        return
    _extend(plugin, _Clipping)
    plugin._mist_engine = engine
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        _extend(scaler, _AgreeingScaler)
        scaler._mist_engine = engine
