"""Gradient clipping and loss scaling that see the whole model, on whatever precision plugin the user chose.

The plugin object keeps its identity and the name of its class, because checkpoints store the plugin's state under that
name; only its class is replaced by a subclass whose clipping asks the engine.
"""

from typing import Any

from lightning_mist.strategy.training.engine import Engine


class _Clipping:
    """Clipping over all stages and shards; mixed into the plugin's class."""

    _mist_engine: Engine | None

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self._mist_engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]
        else:
            self._mist_engine.clip_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        if self._mist_engine is None:
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]
        else:
            self._mist_engine.clip_by_value(optimizer, clip_val)


class _AgreeingScaler:
    """Every rank skips a step if any rank saw a gradient that is not finite; mixed into the scaler's class."""

    _mist_engine: Engine | None

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mist_engine is None:
            return super()._unscale_grads_(optimizer, inv_scale, *args, **kwargs)  # type: ignore[misc]
        with self._mist_engine.unscaling(optimizer, inv_scale):
            found = super()._unscale_grads_(optimizer, inv_scale, *args, **kwargs)  # type: ignore[misc]
        return self._mist_engine.agree_on_overflow(found)


def _extend(instance: Any, mixin: type) -> None:
    cls = type(instance)
    if not issubclass(cls, mixin):
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        instance.__class__ = type(cls.__name__, (mixin, cls), names)


def _put_back(instance: Any, mixin: type) -> None:
    if isinstance(instance, mixin):
        instance.__class__ = type(instance).__bases__[1]
        del instance._mist_engine  # type: ignore[attr-defined]


def attach_engine(plugin: Any, engine: Engine | None) -> None:
    """Let a precision plugin (and its gradient scaler) work for an engine, or be as they were for none."""
    for instance, mixin in ((plugin, _Clipping), (getattr(plugin, "scaler", None), _AgreeingScaler)):
        if engine is None:
            _put_back(instance, mixin)
        elif instance is not None:
            _extend(instance, mixin)
            instance._mist_engine = engine
