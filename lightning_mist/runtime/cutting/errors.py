"""Why a batch is not cut."""


class UncuttableError(Exception):
    """Why a batch stays whole."""
