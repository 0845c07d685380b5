"""Tensors whose parts lie on several ranks and that show their whole shape."""
