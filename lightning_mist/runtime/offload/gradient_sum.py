"""One flat tensor of gradients that are added up in host memory."""

import torch
from torch import Tensor

from lightning_mist.runtime.communication import Work
from lightning_mist.runtime.parameters import Bucket


class GradientSum:
    """Gradients of one unit that one rank updates: at ``home`` in host memory, ``flat`` in a device buffer meanwhile.

    Attributes:
        form: Like the flat tensor that holds them; where ranks reduce them, behind them one number for each that says
            how many ranks had one.
        present: Which of them this rank had.
        earlier, earlier_present: The same of earlier batches, to which this one's will be added.
        work: Their way to other ranks.
    """

    __slots__ = ("bucket", "earlier", "earlier_present", "flat", "form", "home", "is_mine", "present", "work")

    def __init__(self, bucket: Bucket, *, is_mine: bool) -> None:
        self.bucket, self.is_mine = bucket, is_mine
        self.form = torch.empty(0)
        self.home: Tensor | None = None
        self.earlier: Tensor | None = None
        self.flat: Tensor | None = None
        self.present: list[bool] = []
        self.earlier_present: list[bool] = []
        self.work: Work | None = None

    def lay_out(self, *, is_reduced: bool) -> None:
        """Take the shapes and strides that the parameters have now."""
        self.bucket = self.bucket.with_layouts()
        size, dtype = self.bucket.numel + is_reduced * len(self.bucket.names), self.bucket.parameters[0].dtype
        self.form = torch.empty(size, dtype=dtype, device="meta")

    def views(self) -> list[Tensor]:
        """A view of each gradient in its buffer."""
        assert self.flat is not None
        return self.bucket.views(self.flat)
