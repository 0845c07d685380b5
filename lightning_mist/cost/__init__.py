"""How long and how much: expressions become seconds and bytes of a stage, and of a step."""
