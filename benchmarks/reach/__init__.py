"""How many ordinary architectures train under how many plans."""
