import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.runtime.stage.skipped_blocks import SkippedBlocks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.calls = width, 0

    def forward(self, h, mask, *, step):
        self.calls += 1
        return {"h": (h @ h.new_zeros(h.shape[-1], self.width)).transpose(0, 1), "mask": mask, "step": step + 1}


def fake(*shape):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode, torch.empty(*shape)


def form(output):
    h = output["h"]
    return tuple(h.shape), h.stride(), h.dtype, output["step"]


def test_an_answer_has_the_form_of_the_block_s_own():
    mode, h = fake(3, 4)
    block, mask = Block(5), torch.ones(3)
    skipped = SkippedBlocks([block], mode, ())
    first, second = (skipped.answer(0, block.forward, (h, mask), {"step": 1}, None) for _ in range(2))
    assert block.calls == 1
    assert isinstance(second["h"], FakeTensor)
    assert second["h"] is not first["h"]
    assert form(first) == form(second) == ((5, 3), (1, 5), torch.float32, 2)
    assert second["mask"] is mask


def test_other_forms_run_again():
    mode, h = fake(3, 4)
    block = Block(5)
    skipped = SkippedBlocks([block], mode, ())
    skipped.answer(0, block.forward, (h, None), {"step": 1}, None)
    assert skipped.answer(0, block.forward, (h, None), {"step": 7}, None)["step"] == 8
    assert skipped.answer(0, block.forward, (h[:2], None), {"step": 1}, None)["h"].shape == (5, 2)
    skipped.answer(0, block.forward, (h, None), {"step": 1}, "autocast")
    assert block.calls == 4


def test_blocks_of_one_kind_share_what_is_remembered():
    mode, h = fake(3, 4)
    blocks = [Block(4), Block(4), Block(5)]
    skipped = SkippedBlocks(blocks, mode, ())
    for rows in (3, 2, 1):
        shapes = [
            skipped.answer(i, b.forward, (h[:rows], None), {"step": 1}, None)["h"].shape for i, b in enumerate(blocks)
        ]
        assert shapes == [(4, rows), (4, rows), (5, rows)]
    assert [block.calls for block in blocks] == [3, 1, 3]


def test_real_results_and_leaking_blocks_are_computed_each_time():
    class Real(Block):
        def forward(self, h, mask, *, step):
            self.calls += 1
            return h, mask * 2

    mode, h = fake(3, 4)
    for leaking, block in (((), Real(1)), ((0,), Block(4))):
        skipped = SkippedBlocks([block], mode, leaking)
        for _ in range(2):
            skipped.answer(0, block.forward, (h, torch.ones(3)), {"step": 1}, None)
        assert block.calls == 2
