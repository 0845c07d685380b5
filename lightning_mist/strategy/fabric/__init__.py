"""The same for loops that users write: ``Fabric(strategy="mist")``."""
