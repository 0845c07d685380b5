"""Which plan: frontiers of every stage, then a mixed-integer linear program."""
