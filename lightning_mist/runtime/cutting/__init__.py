"""Cutting a batch so that the parts train as the whole does: proved from what the step computes, guarded in flight."""
