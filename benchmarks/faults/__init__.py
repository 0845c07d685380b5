"""Harm to one process of a fit, everywhere and of every kind, and how all of them end."""
