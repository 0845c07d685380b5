"""The cost model against what runs: ``step_times`` executes plans of every kind."""
