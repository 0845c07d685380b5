"""Makes ``strategy="mist"`` known to Trainer and Fabric, whichever copy of Lightning is imported and whenever.

Lightning has no discovery of strategies: a name must stand in the registry of ``lightning.pytorch.strategies`` or of
``pytorch_lightning.strategies`` before a ``Trainer`` is built. :func:`autoload` registers at once where such a module
is already imported, and otherwise leaves a finder on ``sys.meta_path`` that registers the moment it has been. It is
called by ``import torch`` (entry point group ``torch.backends``, torch >= 2.5) and by ``import lightning_mist``. With
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in the environment torch does not call it.

Every ``import torch`` of the environment runs this module, so it imports neither torch nor Lightning nor the rest of
this package, and nothing in it raises: an exception would make ``import torch`` fail for programs that have nothing to
do with us.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

STRATEGIES = {
    "lightning.pytorch.strategies": "lightning_mist.strategy.lightning",
    "pytorch_lightning.strategies": "lightning_mist.strategy.pytorch_lightning",
}
"""Where a Lightning namespace keeps its registry, and the module of ours that holds ``MistStrategy`` for it."""

FABRICS = {
    "lightning.fabric.strategies": "lightning_mist.strategy.fabric_of_lightning",
    "lightning_fabric.strategies": "lightning_mist.strategy.lightning_fabric",
}
"""The same of Fabric and ``MistFabricStrategy``."""

PARSERS = dict.fromkeys(("lightning.pytorch.cli", "pytorch_lightning.cli"), "lightning_mist.strategy.command_line")
"""Where a Lightning namespace keeps the parser of its command line, and what makes its errors on the strategy short."""

NAMES: dict[str, dict[str, str]] = {
    "mist": {},
    "mist_spawn": {"start_method": "spawn"},
    "mist_fork": {"start_method": "fork"},
    "mist_notebook": {"start_method": "fork"},
    "ddp_mist": {},
}
"""Registered names and the constructor arguments each stands for; the same variants as Lightning's ``ddp`` has.

``ddp_mist`` is for projects that look for ``ddp`` in the name of the strategy to see that data are shared out."""


def autoload() -> None:
    """Arrange that the names in :data:`NAMES` are known to every Lightning namespace, imported already or later.

    Calling it again changes nothing.
    """
    for name in (*STRATEGIES, *FABRICS, *PARSERS):
        module = sys.modules.get(name)
        # A module that is being imported right now (Lightning itself imports torch) has no registry yet: its turn
        # comes below, unless its import began before our finder was there.
        if module is not None and hasattr(module, _mark_of(name)):
            _register(module)
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    """Add our names to a namespace's registry, where names stay that are there, or let its parser know our options."""
    try:
        if module.__name__ in PARSERS:
            from importlib import import_module

            import_module(PARSERS[module.__name__]).shorten_errors(module.LightningArgumentParser)
            return
        registry = getattr(module, _mark_of(module.__name__))
        factory = _factory(module.__name__)
        for name, arguments in NAMES.items():
            if name not in registry:
                registry.register(name, factory, description="plans, then trains (lightning-mist)", **arguments)
        if module.__name__ in STRATEGIES and not hasattr(module, _STAND_INS):
            # Command lines find a class by its name among the subclasses there are, and then import it by its path.
            names = ("MistStrategy", "mist")
            made = [type(name, (module.DDPStrategy,), {"__module__": "lightning_mist"}) for name in names]
            setattr(module, _STAND_INS, made)  # subclasses are known only as long as somebody has them
    except Exception as error:
        import logging

        # A log line, not a warning: warnings may be turned into exceptions.
        logging.getLogger("lightning_mist").warning(
            'strategy="mist" is not known to %s: registering it raised %r', module.__name__, error
        )


_STAND_INS = "_lightning_mist_names"


def _mark_of(name: str) -> str:
    """What a module with strategies calls its registry, and one with a command line its parser."""
    if name in PARSERS:
        return "LightningArgumentParser"
    return "STRATEGY_REGISTRY" if name in FABRICS else "StrategyRegistry"


def _factory(strategies: str) -> "Callable[..., Any]":
    """A callable that imports the strategy's module only when a ``Trainer`` or ``Fabric`` asks for it."""

    def create(**arguments: Any) -> Any:
        from importlib import import_module

        if strategies in FABRICS:
            return import_module(FABRICS[strategies]).MistFabricStrategy(**arguments)
        return import_module(STRATEGIES[strategies]).MistStrategy(**arguments)

    return create


class _Finder:
    """Finds what the other finders find, for modules in :data:`STRATEGIES`, :data:`FABRICS`, :data:`PARSERS` only.

    Not derived from ``importlib.abc.MetaPathFinder``, whose import costs milliseconds (it brings ``tempfile`` along).
    """

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> "ModuleSpec | None":
        if fullname not in (*STRATEGIES, *FABRICS, *PARSERS):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", _Loader(spec.loader))
                return spec
        return None


class _Loader:
    """Loads a module as the given loader does, then registers."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def create_module(self, spec: "ModuleSpec") -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not be able to tell that it was found by us (importlib.resources, pickling, inspect).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)
