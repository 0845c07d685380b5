"""The cost model against what runs: ``predicted_vs_measured`` executes plans of every kind."""
