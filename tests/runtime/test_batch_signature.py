from collections import UserDict
from dataclasses import dataclass

import torch

from lightning_mist.tensors import batch_signature


@dataclass
class Pair:
    x: torch.Tensor
    flag: bool


class Plain:
    def __init__(self, size):
        self.data = {"t": torch.zeros(size)}
        self.me = self


def test_values_of_tensors_do_not_count():
    assert batch_signature([torch.zeros(2), 1.0]) == batch_signature([torch.ones(2), 2.0])


def test_shapes_dtypes_and_plain_values_count():
    signatures = [
        batch_signature(batch)
        for batch in (
            {"x": torch.zeros(2)},
            {"x": torch.zeros(3)},
            {"x": torch.zeros(2, dtype=torch.float64)},
            {"y": torch.zeros(2)},
            UserDict({"x": torch.zeros(2)}),
            {"x": torch.zeros(2), "n": 1},
            {"x": torch.zeros(2), "n": 2},
            {"x": torch.zeros(2), "task": "mlm"},
            {"x": torch.zeros(2), "task": "nsp"},
            Pair(torch.zeros(2), True),
            Pair(torch.zeros(2), False),
            Pair(torch.zeros(4), False),
            Plain(2),
            Plain(3),
        )
    ]
    assert len(set(signatures)) == len(signatures)


def test_lists_of_text_count_by_length_only():
    assert batch_signature({"text": ["a", "b"]}) == batch_signature({"text": ["c", "d"]})
    assert batch_signature({"text": ["a", "b"]}) != batch_signature({"text": ["c"]})
