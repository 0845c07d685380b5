"""Public reports of strategies that trained wrongly, hung or refused, each rebuilt as a small project."""
