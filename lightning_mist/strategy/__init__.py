"""Where Lightning speaks, and nowhere else."""
