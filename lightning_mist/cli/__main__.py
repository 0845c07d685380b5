"""``python -m lightning_mist.cli``, and ``torchrun -m lightning_mist.cli profile`` on several nodes."""

from lightning_mist.cli.command import main

if __name__ == "__main__":
    main()
