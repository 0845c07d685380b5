"""Rules for products of matrices.

A dimension of a product plays one of four parts: *rows* of the left operand, *columns* of the right one, *inner* (what
is summed over), or *batch*. With the right operand a weight, sharing its columns is column parallelism: inputs are
whole, outputs shared. Sharing the inner dimension is row parallelism: inputs are shared, the ranks' outputs summands.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from numpy import broadcast_shapes
from torch import Tensor

from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.parts import bind, input_of, operand, part_along, summed
from lightning_mist.tensor_parallel.shard_layout import Layout
from lightning_mist.tensor_parallel.tensor import SplitContext, gathered, layout_of, local_of, rule, wrap


@rule("linear")
def _linear(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "weight", "bias"), args, kwargs, bias=None)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    known = layout_of(weight)
    if weight.dim() != 2:
        return NotImplemented
    if known is not None and known.dim == 0:
        bias = None if bias is None else part_along(context, bias, 0, known.outer)
        sizes = (*x.shape[:-1], known.sizes[0])
        out = F.linear(input_of(context, x), local_of(weight), bias)
        return wrap(out, Layout(sizes, len(sizes) - 1, known.outer), context)
    shared = known or layout_of(x)
    if shared is None:
        return NotImplemented  # only the bias is split
    if known is not None or shared.is_last:
        summand = F.linear(part_along(context, x, -1, shared.outer), part_along(context, weight, 1, shared.outer))
        total = summed(context, summand)
        return total if bias is None else total + gathered(bias)
    bias = None if bias is None else collectives.copy_in(gathered(bias), context.group)
    out = F.linear(local_of(x), collectives.copy_in(weight, context.group), bias)
    return wrap(out, shared.resized(len(shared.sizes) - 1, weight.shape[0]), context)


@rule("matmul", "mm", "bmm", "__matmul__", "__rmatmul__")
def _matmul(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product; NotImplemented where one operand is a vector or both are shared in ways that do not meet."""
    if kwargs.get("out") is not None or len(args) + len(kwargs) != 2:
        return NotImplemented
    left, right = (*args, *kwargs.values())
    if func == Tensor.__rmatmul__:
        left, right = right, left
    if left.dim() < 2 or right.dim() < 2:
        return NotImplemented
    known_left, known_right = layout_of(left), layout_of(right)
    at_left = 0 if known_left is None else known_left.from_end
    at_right = 0 if known_right is None else known_right.from_end
    result: Any = NotImplemented
    if known_right is not None and at_right == -1:
        if at_left >= -2 or right.dim() == 2:
            product = torch.matmul(input_of(context, left), local_of(right))
            result = wrap(product, Layout(_sizes(left, right), product.dim() - 1, known_right.outer), context)
    elif at_left == -1 or at_right == -2:
        inner = known_right if at_right == -2 else known_left
        if inner is not None and at_left >= -2 and at_right >= -2:
            parts = part_along(context, left, -1, inner.outer), part_along(context, right, -2, inner.outer)
            result = summed(context, torch.matmul(*parts))
    elif at_left == -2:
        if known_left is not None and known_right is None:
            product = torch.matmul(local_of(left), collectives.copy_in(right, context.group))
            result = wrap(product, Layout(_sizes(left, right), product.dim() - 2, known_left.outer), context)
    else:
        main = known_right if known_left is None else known_left
        if main is not None:
            sizes = _sizes(left, right)
            layout = Layout(sizes, len(sizes) + main.from_end, main.outer)
            product = torch.matmul(operand(context, left, layout), operand(context, right, layout))
            result = wrap(product, layout, context)
    return result


def _sizes(left: Tensor, right: Tensor) -> tuple[int, ...]:
    return (*broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])


@rule("addmm", "baddbmm")
def _addmm(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(("input", "left", "right"), args, kwargs, beta=1, alpha=1)
    left = next(given[name] for name in ("left", "mat1", "batch1") if name in given)
    right = next(given[name] for name in ("right", "mat2", "batch2") if name in given)
    added, known = given["input"], layout_of(right)
    if kwargs.get("out") is not None:
        return NotImplemented
    if known is not None and known.is_last and right.dim() == 2 and added.dim() == 1:
        layout = Layout((left.shape[0], known.sizes[1]), 1, known.outer)
        scale = {"beta": given["beta"], "alpha": given["alpha"]}
        bias = part_along(context, added, 0, known.outer)
        return wrap(torch.addmm(bias, input_of(context, left), local_of(right), **scale), layout, context)
    product = torch.matmul(left, right)
    product = product if given["alpha"] == 1 else product * given["alpha"]
    if given["beta"] == 0 and not added.requires_grad:  # torch does not look at what it holds then
        return product
    return product + (added if given["beta"] == 1 else added * given["beta"])


@rule("einsum")
def _einsum(context: SplitContext, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums over products named by letters: on parts if one letter is shared."""
    equation, tensors = args[0], args[1:]
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or any(len(set(term)) != len(term) for term in terms):
        return NotImplemented
    layouts = [layout_of(tensor) for tensor in tensors]
    shared = {(term[found.dim], found.outer) for term, found in zip(terms, layouts, strict=True) if found is not None}
    if len(shared) != 1:
        return NotImplemented
    letter, outer = next(iter(shared))
    parts = [
        part_along(context, tensor, term.index(letter), outer)
        if letter in term
        else collectives.copy_in(tensor, context.group)
        for term, tensor in zip(terms, tensors, strict=True)
    ]
    result = torch.einsum(equation, *parts)
    if letter not in output:
        return summed(context, result)
    sizes = list(result.shape)
    sizes[output.index(letter)] *= context.degree
    return wrap(result, Layout(tuple(sizes), output.index(letter), outer), context)
