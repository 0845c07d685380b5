"""Steps and optimizers of which a trial would never end: what they wait for is not there, or they go by values."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_gather

from tests.traps.project import VOCABULARY, Project, Trap, loader


class Writer:
    """Writes as TensorBoard's writer does: into a queue of ten, which a thread empties."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue(10)
        self.written: list[float] = []
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        while True:
            self.written.append(self.events.get())
            self.events.task_done()

    def add_scalar(self, value: torch.Tensor) -> None:
        self.events.put(float(value.detach()))


class Writes(Project):
    """Gives every step's loss to a writer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def setup(self, stage: str) -> None:
        self.writer = Writer()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for _ in range(12):
            self.writer.add_scalar(loss)
        return loss

    def on_train_end(self) -> None:
        self.writer.events.join()
        self.seen += self.writer.written


class WritesOnOne(Writes):
    """The first process writes, as loggers do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.global_rank == 0 else self.loss(batch)


class Held(Project):
    """A lock that a thread holds until it is asked for it."""

    def setup(self, stage: str) -> None:
        self.lock, self.wanted, self.free = threading.Lock(), threading.Event(), threading.Semaphore(0)
        threading.Thread(target=self._hold, daemon=True).start()
        self.free.acquire()

    def _hold(self) -> None:
        while True:
            with self.lock:
                self.free.release()
                self.wanted.wait()
                self.wanted.clear()
            self.free.acquire()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.wanted.set()
        with self.lock:
            loss = self.loss(batch)
        self.free.release()
        self.free.acquire()
        return loss


class Prefetched(Project):
    """A thread of its own makes what the step takes."""

    def setup(self, stage: str) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.pool.submit(lambda: 0.5).result()


class Polls(Prefetched):
    """Looks again and again whether a thread has done its work."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = self.pool.submit(lambda: 0.5)
        while not made.done():
            time.sleep(1e-3)
        return self.loss(batch) * made.result()


class Fixed(Project):
    """Runs a block until what it gives stays as it is: how often, values say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old, new = torch.zeros((), dtype=torch.float64), self.embed(batch["x"])
        for block in self.blocks:
            new = block(new)
        while (new - old).abs().max() > 1e-3:
            old, new = new, 0.5 * torch.tanh(self.blocks[-1].down(self.blocks[-1].up(new)))
        return new.square().mean()


class Adaptive(Project):
    """Solves with steps as long as the error of the last one lets them be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state, now, length = self.hidden(batch), 0.0, 0.3
        while now < 1.0:
            change = torch.tanh(state) * length
            error = float((change - torch.tanh(state + 0.5 * change) * length).abs().max())
            if error > 0.05:
                length *= 0.5
                continue
            state, now = state + change, now + length
            length = min(2 * length, 1.0 - now) if error < 1e-3 else min(length, max(1.0 - now, 1e-9))
        return state.square().mean()


class Rejects(Project):
    """Draws until it has as many as it needs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, found = self.hidden(batch), []
        while sum(map(len, found)) < 8:
            noise = torch.rand(hidden.shape[:2], dtype=torch.float64)
            found.append(hidden[noise * hidden.mean(-1).sigmoid() > 0.3])
        return torch.cat(found)[:8].square().mean()


class Generates(Project):
    """Validation goes on with the rows until a word ends each of them."""

    most = 10**9

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, ended = batch["x"], torch.zeros(len(batch["x"]), dtype=torch.bool)
        while not ended.all() and rows.shape[1] < self.most:
            word = (self.logits({"x": rows[:, -6:]})[:, -1] + rows[:, :1]).argmax(-1)
            word = (word + rows.shape[1]) % VOCABULARY
            ended = ended | (word < 3)
            rows = torch.cat((rows, word[:, None]), 1)
        self.log("length", float(rows.shape[1]), sync_dist=True)
        self.log("val_loss", self.loss(batch), sync_dist=True)


class GeneratesWhile(Generates):
    """The same, as transformers writes it: whether rows are unfinished is known by a value."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, going = batch["x"], torch.ones(len(batch["x"]), dtype=torch.long)
        is_over = False
        while not is_over:
            word = self.logits({"x": rows[:, -6:]})[:, -1].argmax(-1)
            word = ((word + rows.shape[1]) % VOCABULARY) * going
            going = going & (word >= 3)
            rows, is_over = torch.cat((rows, word[:, None]), 1), going.max() == 0
        self.log("val_loss", self.loss(batch) + rows.shape[1], sync_dist=True)


class Sharing(torch.optim.SGD):
    """Each process updates its share of the parameters and gets the others'."""

    def share(self, mine: torch.Tensor, whole: list[torch.Tensor]) -> None:
        all_gather(whole, mine)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for base in range(0, len(parameters), world):
                some = parameters[base : base + world]
                mine = some[min(rank, len(some) - 1)]
                mine.sub_(mine.grad, alpha=group["lr"])
                every = [torch.empty_like(p) for p in (some * 2)[:world]]
                if len({p.shape for p in some}) == 1 and len(some) == world:
                    self.share(mine, every)
                    for p, value in zip(some, every, strict=True):
                        p.copy_(value)
                else:
                    for p in some:
                        if p is not mine:
                            p.sub_(p.grad, alpha=group["lr"])
        return loss


class Functional(Sharing):
    """The same with what compiled programs call."""

    def share(self, mine: torch.Tensor, whole: list[torch.Tensor]) -> None:
        every = functional.all_gather_tensor(mine[None].contiguous(), 0, dist.group.WORLD)
        for p, value in zip(whole, every.chunk(len(whole)), strict=True):
            p.copy_(value[0])


class Direct(Sharing):
    """The same, past torch's own functions."""

    def share(self, mine: torch.Tensor, whole: list[torch.Tensor]) -> None:
        dist.group.WORLD.allgather([whole], [mine]).wait()


class Shares(Project):
    optimizer = Sharing

    def configure_optimizers(self) -> Any:
        hidden = [p for p in self.blocks.parameters() if p.ndim == 2]
        return self.optimizer(sorted(hidden, key=lambda p: p.shape), lr=1e-2)


class SharesFunctional(Shares):
    optimizer = Functional


class SharesDirect(Shares):
    optimizer = Direct


AUTO = ("auto", "searched")
_VAL = {"val": lambda: loader(8, seed=1)}

TRAPS = {
    "writes": Trap(module=Writes, plans=(*AUTO, "zero3", "pp2"), equal=AUTO, reason="trials.py"),
    "writes on one": Trap(module=WritesOnOne, plans=(*AUTO, "pp2"), equal=AUTO, reason="trials.py"),
    "held": Trap(module=Held, plans=(*AUTO, "zero3"), equal=AUTO, reason="trials.py"),
    "prefetched": Trap(module=Prefetched, plans=(*AUTO, "zero3"), equal=AUTO, reason="trials.py"),
    "polls": Trap(module=Polls, plans=(*AUTO, "zero3"), equal=AUTO, reason="trials.py"),
    "fixed": Trap(module=Fixed, plans=(*AUTO, "zero3", "cut", "pp2", "tp2"), equal=AUTO),
    "adaptive": Trap(module=Adaptive, plans=(*AUTO, "zero3", "cut", "pp2", "tp2"), equal=AUTO),
    "rejects": Trap(module=Rejects, plans=(*AUTO, "zero3", "cut", "pp2", "tp2"), equal=AUTO),
    "generates": Trap(
        module=Generates, **_VAL, plans=("auto", "zero3", "pp2", "tp2"), equal=("auto", "zero3", "pp2", "tp2")
    ),
    "generates while": Trap(
        module=GeneratesWhile, **_VAL, plans=("auto", "zero3", "pp2", "tp2"), equal=("auto", "zero3", "pp2", "tp2")
    ),
    "shares": Trap(module=Shares, plans=(*AUTO, "zero1"), equal=AUTO, reason="trials.py"),
    "shares functional": Trap(module=SharesFunctional, plans=(*AUTO, "zero1"), equal=AUTO, reason="trials.py"),
    "shares direct": Trap(module=SharesDirect, plans=(*AUTO, "zero1"), equal=AUTO, reason="trials.py"),
}
