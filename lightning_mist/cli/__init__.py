"""The command line: plans, estimates and pictures without the machine that they are for."""

from lightning_mist.cli.command import main
