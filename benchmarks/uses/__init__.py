"""Ways to use Lightning, each trained by DDP and by plans of every kind: what differs is found, and said."""
