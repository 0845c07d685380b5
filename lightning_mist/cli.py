"""The command line."""


def main() -> None:
    """Run the ``lightning-mist`` command."""
