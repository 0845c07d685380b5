"""Lightning's own tests with its strategies replaced by this one."""
