"""A training planner and runtime for PyTorch Lightning: ``Trainer(strategy="mist")``."""

__version__ = "0.1.0"
