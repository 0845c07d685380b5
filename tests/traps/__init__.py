"""Small projects written to be trained wrongly, under DDP and under plans: no difference without a word."""
