"""Device memory that no tensor asks for, step by step: the context, kernels, workspaces, communicators.

    python -m benchmarks.hardware.device_memory

Every row is what one step more has taken: of the device outside of torch's allocator, and of the allocator for what no
tensor holds. Run on a card that nobody else uses.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.card import NO_CARD
from benchmarks.record import Sample, make_record, write_record

WIDTH = 1024


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype, requires_grad=True)


def _backward(forward: Callable[[], Tensor]) -> None:
    forward().sum().backward()  # type: ignore[no-untyped-call]


def _in_bfloat16() -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.linear(_ones(64, WIDTH), _ones(WIDTH, WIDTH), _ones(WIDTH))


def _attention() -> Tensor:
    q, k, v = (_ones(2, 8, WIDTH, 64, dtype=torch.bfloat16) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _classified() -> Tensor:
    ids = torch.zeros(64, dtype=torch.long, device="cuda")
    return F.cross_entropy(F.layer_norm(F.embedding(ids, _ones(WIDTH, WIDTH)), (WIDTH,)), ids)


def _update() -> None:
    weight = torch.nn.Parameter(torch.ones(WIDTH, device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)


def _join() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    dist.all_reduce(torch.ones(8, device="cuda"))


def _another_group() -> None:
    dist.all_reduce(torch.ones(8, device="cuda"), group=dist.new_group([0]))


def _on_another_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.mm(_ones(64, 64), _ones(64, 64))
    torch.cuda.synchronize()


STEPS: dict[str, Callable[[], object]] = {
    "context": torch.cuda.init,
    "first kernel": lambda: _ones(8) * 2,
    "product": lambda: _ones(WIDTH, WIDTH) @ _ones(WIDTH, WIDTH),
    "product and its backward": partial(_backward, lambda: _ones(WIDTH, WIDTH) @ _ones(WIDTH, WIDTH)),
    "linear layer under autocast": partial(_backward, _in_bfloat16),
    "attention": partial(_backward, _attention),
    "embedding, norm and loss": partial(_backward, _classified),
    "optimizer and clipping": _update,
    "first collective of a group of one": _join,
    "first collective of another group of one": _another_group,
    "product on another stream": _on_another_stream,
}


def rows() -> Iterator[Sample]:
    """What every step takes more than those before it."""
    before = (0, 0)
    for name, step in STEPS.items():
        step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        now = total - free - torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        yield {
            "step": name,
            "outside_bytes": now[0] - before[0],
            "held_bytes": now[1] - before[1],
            "outside_so_far_bytes": now[0],
        }
        before = now


def main() -> None:
    """Measure, and write the record."""
    if not torch.cuda.is_available():
        sys.exit(NO_CARD)
    samples = []
    for row in rows():
        samples.append(row)
        print(row, flush=True)
    dist.destroy_process_group()
    print(write_record(make_record("device-memory", samples, notes=f"CUDA {torch.version.cuda}.")))


if __name__ == "__main__":
    main()
