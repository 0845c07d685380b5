"""Doing it: obeys a plan and a schedule, knows nothing of how they came about."""
