"""Registers the strategy name when Lightning is imported; called by ``import torch`` through an entry point."""


def autoload() -> None:
    """Arrange that ``"mist"`` is known to every Lightning namespace."""
