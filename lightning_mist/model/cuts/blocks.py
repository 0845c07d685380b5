"""Finding the repeated blocks of any module.

The outermost ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least two children of one class that is not a
primitive layer holds blocks: all its children with parameters that are not primitive, so that models which alternate
between two classes are covered too. Where those children differ in their parameters' shapes and hold lists of one class
themselves (stages of different width), the inner lists hold the blocks.

Whether each block is called exactly once, and in which order, is confirmed by the trace.
"""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from lightning_mist.errors import TraceError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PRIMITIVE_PACKAGES = ("torch.nn.", "transformers.pytorch_utils")


def find_blocks(module: nn.Module, override: str | None = None) -> tuple[str, ...]:
    """Qualified names of the candidate repeated blocks, in the order of ``named_modules``.

    Args:
        override: Names the blocks instead: a container (its children with parameters), a pattern of qualified names
            such as ``"model.layers.*"``, or a class name. Alternatives are separated by commas.
    """
    if override is not None:
        return _named_blocks(module, override)
    seen: set[int] = set()
    names = []
    for name, block in _search(module, ""):
        if id(block) not in seen:
            seen.add(id(block))
            names.append(name)
    return tuple(names)


def container_of(name: str) -> str:
    """Name of the container of a block."""
    return name.rpartition(".")[0]


def _named_blocks(module: nn.Module, override: str) -> tuple[str, ...]:
    modules = dict(module.named_modules())
    chosen: dict[str, None] = {}
    for part in (text.strip() for text in override.split(",")):
        if isinstance(modules.get(part), _CONTAINERS):
            found = [f"{part}.{child}" for child, block in modules[part].named_children() if _has_parameters(block)]
        else:
            found = [
                name
                for name, block in modules.items()
                if name
                and (type(block).__name__ == part or (fnmatchcase(name, part) and name.count(".") == part.count(".")))
            ]
        if not found:
            raise TraceError(
                f"blocks={override!r}: {part!r} names no module. Give a container such as 'model.layers', a pattern "
                "such as 'model.layers.*', or a class name"
            )
        chosen.update(dict.fromkeys(found))
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise TraceError(f"blocks={override!r}: {name} lies inside {outer}. A block may not contain another")
    return tuple(chosen)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_primitive(module: nn.Module) -> bool:
    package = type(module).__module__
    return next(module.children(), None) is None and package.startswith(_PRIMITIVE_PACKAGES)


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _search(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _CONTAINERS):
        children = [
            (f"{prefix}{name}", child)
            for name, child in module.named_children()
            if _has_parameters(child) and not _is_primitive(child)
        ]
        if max(Counter(type(child) for _, child in children).values(), default=0) >= 2:
            yield from _inner_blocks(module, children) or children
            return
    for name, child in module.named_children():
        yield from _search(child, f"{prefix}{name}.")


def _inner_blocks(container: nn.Module, children: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]] | None:
    """Blocks of one class inside children of different widths, if they hold most of the parameters."""
    if len({_shapes(child) for _, child in children}) == 1:
        return None
    inner = [found for name, child in children for found in _search(child, f"{name}.")]
    if not inner or any(type(block) is not type(inner[0][1]) for _, block in inner):
        return None
    inside = sum(parameter.numel() for _, block in inner for parameter in block.parameters())
    return inner if 2 * inside > sum(parameter.numel() for parameter in container.parameters()) else None
