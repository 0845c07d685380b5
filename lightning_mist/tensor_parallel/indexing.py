"""Which layout a tensor has behind ``tensor[...]``."""

from typing import Any

from lightning_mist.tensor_parallel.shard_layout import Layout, slice_shared


def complete(items: Any, num_dims: int) -> tuple[Any, ...] | None:
    """An index with one item per dimension and one ``None`` per new one.

    None if it is not a basic one; next to slices one list of positions is allowed, which stays in its place.
    """
    items = items if isinstance(items, tuple) else (items,)
    lists = sum(_is_list(item) for item in items)
    if not all(_is_basic(item) or _is_list(item) for item in items):
        return None
    if lists > 1 or (lists and any(type(item) is int for item in items)):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    rest = (slice(None),) * (num_dims - used)
    if not any(item is Ellipsis for item in items):
        return (*items, *rest)
    at = next(index for index, item in enumerate(items) if item is Ellipsis)
    return (*items[:at], *rest, *items[at + 1 :])


def _is_basic(item: Any) -> bool:
    return item is None or item is Ellipsis or isinstance(item, slice) or (type(item) is int)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(position) is int for position in item)


def index(layout: Layout, items: tuple[Any, ...], degree: int) -> tuple[tuple[Any, ...], Layout] | None:
    """The index into a part and the layout of what it gives; None if that is not evenly shared out.

    Args:
        layout: How the tensor is shared out.
        items: A complete index.
        degree: Number of ranks.
    """
    local, sizes, source, shared, outer = list(items), list[int](), 0, -1, layout.outer
    for place, item in enumerate(items):
        if item is None:
            sizes.append(1)
            continue
        size, is_shared = layout.sizes[source], source == layout.dim
        source += 1
        if isinstance(item, (int, list)):
            if is_shared:
                return None
            sizes += [len(item)] if isinstance(item, list) else []
            continue
        start, end, step = item.indices(size)
        if is_shared:
            shared = len(sizes)
            if (start, end, step) != (0, size, 1):
                cut = slice_shared(layout, start, end) if step == 1 else None
                if cut is None:
                    return None
                outer, local[place] = cut.outer, slice(start // degree, end // degree)
        sizes.append(len(range(start, end, step)))
    return tuple(local), Layout(tuple(sizes), shared, outer)
