"""Which blocks cost the same: one traced example answers for all of its kind."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_mist.model.trace.counted_step import StepCount
from lightning_mist.plan import ModuleMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A part of the step, by its index from head to tail, that stands for its kind."""

    part: int
    follower: int | None  # index of the part after it if that is of the same kind, else ``None``
    label: str
    block: str  # qualified name of the block, if it is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Blocks sorted into kinds."""

    labels: tuple[str, ...]  # unique name of every kind, in order of first appearance
    examples: tuple[int, ...]  # position of the first block of every kind
    of: tuple[int, ...]  # for every block position, the index of its kind

    def members(self, kind: int) -> tuple[int, ...]:
        """Positions of the blocks of a kind."""
        return tuple(position for position, own in enumerate(self.of) if own == kind)

    def parts(self, blocks: Sequence[str]) -> tuple[Example, ...]:
        """The parts that stand for all: head, examples, tail."""
        last = len(self.of) - 1
        layers = []
        for kind, (position, label) in enumerate(zip(self.examples, self.labels, strict=True)):
            is_followed = position < last and self.of[position + 1] == kind
            layers.append(
                Example(
                    part=position + 1,
                    follower=position + 2 if is_followed else None,
                    label=label,
                    block=blocks[position],
                )
            )
        head = Example(part=0, follower=None, label="head", block="")
        return head, *layers, replace(head, part=last + 2, label="tail")

    def twins(self, *, surrounded: bool = False) -> tuple[int | None, ...]:
        """For every block ``None`` if it runs itself, else the position of the example of its kind.

        Args:
            surrounded: Whether the blocks around an example run too, so that it begins, forward and backward, with what
                a real block leaves alive, and the last block, for the tail. Thereby one block is seen to follow another
                of its kind.
        """
        runs = set(self.examples)
        if surrounded:
            runs |= {len(self.of) - 1, *(position + near for position in self.examples for near in (-1, 1))}
        return tuple(None if i in runs else self.examples[k] for i, k in enumerate(self.of))


def group(names: Sequence[str], keys: Sequence[Hashable]) -> Kinds:
    """Sort blocks into kinds by equal keys."""
    examples: dict[Hashable, int] = {}
    for position, key in enumerate(keys):
        examples.setdefault(key, position)
    order = {key: index for index, key in enumerate(examples)}
    firsts = tuple(examples.values())
    labels: list[str] = []
    for position in firsts:
        name = names[position]
        taken = sum(1 for other in firsts[: len(labels)] if names[other] == name)
        labels.append(name if not taken else f"{name}#{taken + 1}")
    return Kinds(labels=tuple(labels), examples=firsts, of=tuple(order[key] for key in keys))


def module_key(block: nn.Module) -> Hashable:
    """What a block is by itself: its class, and shape, type and training of every parameter."""
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block), block.training, parameters


def cost_keys(blocks: Sequence[nn.Module], counts: Sequence[StepCount]) -> list[Hashable]:
    """Keys under which blocks are of one kind: themselves, their inputs, and all they cost in whole counted runs."""

    def costs(count: StepCount, part: int) -> Hashable:
        forward, backward = count.forward[part], count.backward[part]
        return (
            count.inputs[part - 1],
            (forward.flops, forward.moved_bytes, forward.operators),
            (backward.flops, backward.moved_bytes, backward.operators),
            (count.saved[part], count.made[part]),
            max(count.forward_peaks(part)),
            max(count.backward_peaks(part), default=0),
        )

    return [(module_key(b), *(costs(count, i + 1) for count in counts)) for i, b in enumerate(blocks)]


def trained_beside(module_map: ModuleMap) -> list[tuple[str, ...]]:
    """Of every block the trained parameters outside of it that its part of the step uses, such as adapters kept apart.

    Events know these by their whole names, so that blocks with different ones cannot answer for each other. What the
    last block's part uses cannot be told from the tail's, and the tail's differ from all others'.
    """
    found: list[set[str]] = [set() for _ in module_map.blocks]
    for use in module_map.parameters:
        for module, _, parts in use.slots if use.requires_grad else ():
            for part in parts:
                if 0 <= part < len(found) - 1 and not f"{module}.".startswith(f"{module_map.blocks[part]}."):
                    found[part].add(use.name)
    return [tuple(sorted(names)) for names in found]


def is_faithful(whole: StepCount, brief: StepCount, kinds: Kinds) -> bool:
    """Whether a run in which twins imitate their examples counts the same as the whole run did."""
    parts = (0, *(i + 1 for i in kinds.examples), len(kinds.of) + 1)
    return all(
        (whole.forward[p].flops, whole.forward[p].operators, whole.backward[p].flops, whole.backward[p].operators)
        == (brief.forward[p].flops, brief.forward[p].operators, brief.backward[p].flops, brief.backward[p].operators)
        and whole.saved[p] == brief.saved[p]
        and whole.forward_peaks(p) == brief.forward_peaks(p)
        and whole.backward_peaks(p) == brief.backward_peaks(p)
        for p in parts
    )
