"""End to end against other strategies. ``against_ddp`` asks what mist costs where it has nothing to gain."""
