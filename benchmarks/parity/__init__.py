"""Losses and gradients of plans against those of a single process."""
