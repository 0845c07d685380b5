"""Checkpoints: what one plan has saved, another goes on with."""
