"""How long planning takes."""
