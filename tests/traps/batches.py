"""Batches of every kind: ragged and sparse tensors, tensors with more to them, containers with other constructors."""

import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from tests.traps.project import ROWS, WIDTH, Project, Rows, Trap

EVERY = ("auto", "zero1", "zero3", "cut", "pp2", "pp2cut", "tp2", "moved")
WHOLE = ("auto", "zero1", "zero3", "pp2", "moved")
"""Plans under which batches are whole, and ranks that share layers do not differ from those that do not."""

Pair = namedtuple("Pair", ["x", "y"])


class Moves:
    """Knows how to move to a device, so that Lightning leaves it to that."""

    def to(self, device: Any, **options: Any) -> Any:
        return self


class Checked(Moves, namedtuple("Checked", ["x", "y"])):
    """A named tuple whose constructor looks at its members, and takes others."""

    def __new__(cls, both: Any) -> "Checked":
        assert both["x"].device == both["y"].device
        return super().__new__(cls, both["x"], both["y"])

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (dict(zip(self._fields, self, strict=True)),)


class Sample(Moves, dict[str, Any]):
    """A dictionary that is made of two things, and refuses to be made of others."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x=x, y=y)
        self.made = True


class Listed(Moves, list[Any]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__([x, y])


@dataclass(frozen=True)
class Record(Moves):
    x: torch.Tensor
    y: torch.Tensor
    length: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.x.shape[1])


class Meta(torch.Tensor):
    """A tensor that carries what is known of it, as those of medical images do."""

    meta: dict[str, Any]

    @classmethod
    def of(cls, tensor: torch.Tensor, **meta: Any) -> "Meta":
        made = tensor.as_subclass(cls)
        made.meta = meta
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Meta) and not hasattr(result, "meta"):
            result.meta = next((a.meta for a in args if isinstance(a, Meta) and hasattr(a, "meta")), {})
        return result


class _Store(MutableMapping[str, Any]):
    def __init__(self) -> None:
        self._mapping: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Graph:
    """Nodes, edges and labels by attribute, kept in a store, as torch_geometric keeps them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = _Store()
        self._store.update(values)

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__:
            raise AttributeError(name)
        try:
            return self._store[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def pop(self, name: str) -> Any:
        return self._store.pop(name)

    def to(self, device: Any, **options: Any) -> "Graph":
        for name, value in self._store.items():
            if isinstance(value, torch.Tensor):
                self._store[name] = value.to(device)
        return self


def _stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}


def _tokens(rows: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Rows of several lengths."""
    return [row["x"][: 2 + int(row["index"]) % 4] for row in rows]


def _graph(rows: list[dict[str, torch.Tensor]]) -> Graph:
    """Rows of several lengths as one graph, in which each node follows the one before it."""
    tokens = _tokens(rows)
    owner = torch.cat([torch.full((len(row),), number) for number, row in enumerate(tokens)])
    edges = torch.stack([torch.arange(len(owner) - 1), torch.arange(1, len(owner))])
    edges = edges[:, owner[edges[0]] == owner[edges[1]]]
    return Graph(x=torch.cat(tokens), edge_index=edges, batch=owner, num_graphs=len(rows))


def _adjacency(rows: list[dict[str, torch.Tensor]], layout: torch.layout) -> dict[str, Any]:
    graph = _graph(rows)
    size = len(graph.x)
    ones = torch.ones(graph.edge_index.shape[1], dtype=torch.float64)
    links = torch.sparse_coo_tensor(graph.edge_index.flip(0), ones, (size, size)).coalesce()
    return {"x": graph.x, "links": links if layout is torch.sparse_coo else links.to_sparse_csr()}


class _Brought(Project):
    """Takes whatever the batch is for a dictionary of ``x`` and ``y``."""

    def read(self, batch: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(self.read(batch))


def of(read: Callable[[Any], Any], collate: Callable[[list[Any]], Any], **options: Any) -> Trap:
    """A trap with such batches, and a step that reads them so."""

    class Brought(_Brought):
        def read(self, batch: Any) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = read(batch)
            return found

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss, batch_size=ROWS)
            return loss

    return Trap(module=Brought, train=lambda: DataLoader(Rows(48), batch_size=ROWS, collate_fn=collate), **options)


def _padded(batch: Any) -> dict[str, torch.Tensor]:
    tokens = batch["x"].to_padded_tensor(0).long()
    return {"x": tokens, "y": tokens}


def _ragged(layout: torch.layout) -> Callable[[list[Any]], Any]:
    return lambda rows: {"x": torch.nested.nested_tensor([t.double() for t in _tokens(rows)], layout=layout)}


def _read_meta(batch: Any) -> dict[str, torch.Tensor]:
    assert isinstance(batch["x"], Meta)
    shift = batch["x"].meta["shift"]
    return {"x": (batch["x"].as_subclass(torch.Tensor) + shift) % 17, "y": batch["y"]}


def _read_packed(batch: Any) -> dict[str, torch.Tensor]:
    (pair, counts) = batch
    assert isinstance(pair.x, PackedSequence)
    assert counts["n"] == ROWS
    tokens, _ = pad_packed_sequence(pair.x, batch_first=True)
    return {"x": tokens, "y": tokens}


def _read_popped(batch: Any) -> dict[str, torch.Tensor]:
    labels = batch.pop("y")
    return {"x": batch["x"], "y": labels}


def _read_popped_graph(batch: Any) -> dict[str, torch.Tensor]:
    edges = batch.pop("edge_index")
    assert edges.shape[0] == 2
    return {"x": batch.x[None], "y": batch.x[None]}


class Linked(Project):
    """Message passing over edges, or over a sparse matrix."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.embed(batch["x"] if isinstance(batch, dict) else batch.x)
        for block in self.blocks:
            if isinstance(batch, dict):
                hidden = hidden + torch.sparse.mm(batch["links"], block.down(F.gelu(block.up(block.norm(hidden)))))
            else:
                source, target = batch.edge_index
                hidden = hidden + torch.zeros_like(hidden).index_add(0, target, block(hidden[None])[0][source])
        tokens = batch["x"] if isinstance(batch, dict) else batch.x
        return F.cross_entropy(self.head(hidden), tokens)


class OfNested(Project):
    """Layers that compute on ragged tensors as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(1, WIDTH).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.inlet(batch["x"].unsqueeze(-1) if "layout" in batch else batch["x"])
        for block in self.blocks:
            hidden = hidden + block.down(F.gelu(block.up(block.norm(hidden))))
        return self.head(hidden).values().pow(2).mean()


def _with(make: Callable[[], Any]) -> Callable[[list[Any]], Any]:
    return lambda rows: _stacked(rows) | {"held": make()}


def _loader(collate: Callable[[list[Any]], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(Rows(48), batch_size=ROWS, collate_fn=collate)


def _jagged_values(rows: list[Any]) -> Any:
    return {"x": torch.nested.nested_tensor([t.double()[:, None] for t in _tokens(rows)], layout=torch.jagged)}


def _same(batch: Any) -> Any:
    return batch


TRAPS = {
    "packed": of(
        _read_packed,
        lambda rows: [Pair(pack_sequence(_tokens(rows), enforce_sorted=False), None), {"n": len(rows)}],
        plans=EVERY,
        equal=WHOLE,
        reason="first dimension",
    ),
    "checked": of(lambda b: {"x": b.x, "y": b.y}, lambda rows: Checked(_stacked(rows)), plans=EVERY, equal=EVERY),
    "dictionary": of(_same, lambda rows: Sample(**_stacked(rows)), plans=EVERY, equal=EVERY),
    "list": of(lambda b: {"x": b[0], "y": b[1]}, lambda rows: Listed(**_stacked(rows)), plans=EVERY, equal=EVERY),
    "record": of(lambda b: {"x": b.x, "y": b.y}, lambda rows: Record(**_stacked(rows)), plans=EVERY, equal=EVERY),
    "popped": of(_read_popped, _stacked, plans=("halves", *EVERY), equal=("halves", *EVERY)),
    "popped graph": of(_read_popped_graph, _graph, plans=EVERY, equal=WHOLE, reason="first dimension"),
    "meta": of(
        _read_meta,
        lambda rows: _stacked(rows) | {"x": Meta.of(_stacked(rows)["x"], shift=int(rows[0]["index"]) % 3)},
        plans=EVERY,
        equal=WHOLE,
    ),
    "jagged": of(_padded, _ragged(torch.jagged), plans=EVERY, equal=WHOLE, reason="first dimension"),
    "nested": of(_padded, _ragged(torch.strided), plans=EVERY, equal=WHOLE, reason="first dimension"),
    "jagged layers": Trap(module=OfNested, train=_loader(_jagged_values), plans=EVERY, equal=("auto",)),
    "graph": Trap(module=Linked, train=_loader(_graph), plans=EVERY, equal=WHOLE),
    "sparse": Trap(
        module=Linked, train=_loader(lambda rows: _adjacency(rows, torch.sparse_coo)), plans=EVERY, equal=("auto",)
    ),
    "sparse rows": Trap(
        module=Linked, train=_loader(lambda rows: _adjacency(rows, torch.sparse_csr)), plans=EVERY, equal=("auto",)
    ),
    "lock": of(_same, _with(threading.Lock), plans=EVERY, equal=("auto",), reason="cannot be copied"),
    "file": of(_same, _with(Path(__file__).open), plans=EVERY, equal=("auto",), reason="cannot be copied"),
    "function": of(_same, _with(lambda: lambda: 1), plans=EVERY, equal=("auto", "zero1"), reason="cannot"),
}
