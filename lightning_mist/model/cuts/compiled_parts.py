"""Which parts of a module ``torch.compile`` has compiled, in whatever way they were."""

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_mist.attributes import MACHINERY, is_a, of_class, package_of, stored
from lightning_mist.model.user_code import Code, names_in
from lightning_mist.plan.module_map import Exclusion, Feature, exclusions_of
from lightning_mist.plan.plan_tables import ranges

_ANYWHERE: tuple[Feature, ...] = ("pipeline", "tensor", "sequence")
_INSIDE: tuple[Feature, ...] = ("microbatches", "sharded_parameters")

_COMPILED = (
    "is compiled by torch.compile, whose code runs as a whole, on tensors as it knows them: leave torch.compile out "
    "for such plans"
)
_TORCHSCRIPT = "is TorchScript, whose code reads parameters where nobody sees it: leave torch.jit out for such plans"
_SCRIPTED: tuple[Feature, ...] = ("pipeline", "sharded_parameters", "offloaded_parameters")


def compiled_exclusions(module: nn.Module, blocks: Sequence[str] = ()) -> tuple[Exclusion, ...]:
    """What compiled code rules out: to be left in the middle, and to be given tensors without values, or in parts.

    Code around the blocks leaves them to the engine, which runs them as they are; other code runs compiled, and holds
    on to the shapes and the parameters that it has seen.
    """
    places = list(_compiled(module))
    found = [(place, _ANYWHERE) for place in places[:1]]
    around = ("the module", *(place for place in places if any(block.startswith(f"{place}.") for block in blocks)))
    found += [(place, _INSIDE) for place in [place for place in places if place not in around][:1]]
    parts = [item for item in module.named_modules() if is_a(item[1], torch.jit.ScriptModule)]
    scripted = [name for name, part in parts if any(True for _ in part.parameters())]
    reasons = [(f"{place} {_COMPILED}", features) for place, features in found]
    reasons += [(f"{name} {_TORCHSCRIPT}", _SCRIPTED) for name in scripted[:1]]
    return exclusions_of(reasons)


def is_compiled_block(block: nn.Module) -> bool:
    """Whether calling a block runs compiled code."""
    return _is_compiled(block) or stored(block, "_compiled_call_impl") is not None


def compiled_text(module: nn.Module, blocks: Sequence[str]) -> str:
    """Which blocks are compiled, such as "blocks 0-23 compiled"; empty if none is."""
    found = [number for number, name in enumerate(blocks) if is_compiled_block(module.get_submodule(name))]
    return f"block{'s' if len(found) > 1 else ''} {ranges(found)} compiled" if found else ""


def _compiled(module: nn.Module) -> Iterator[str]:
    # What Lightning keeps of ``torch.compile(module)``: its steps compiled, and this mark.
    is_whole = stored(module, "_compiler_ctx") is not None
    if is_whole:
        yield "the module"
    seen: set[type] = set()
    for name, part in module.named_modules():
        what = name.removesuffix("_orig_mod").removesuffix(".") or "the module"
        if is_compiled_block(part):
            yield what
        elif not (is_whole and part is module):
            yield from (f"{what}.{key}" for key, value in vars(part).items() if _is_compiled(value))
        for cls in type(part).__mro__:
            if cls not in seen and package_of(cls) not in MACHINERY and cls is not object:
                seen.add(cls)
                yield from _of_class(cls)


def _of_class(cls: type) -> Iterator[str]:
    """Compiled methods, and compiled functions of its file that methods call."""
    for key, value in vars(cls).items():
        if _is_compiled(value):
            yield f"{cls.__name__}.{key}"
        elif is_a(value, types.FunctionType):
            code = Code.of(value)
            for name in sorted(names_in(code.code)):
                if any(_is_compiled(item) for item in code.named([name])):
                    yield f"{name}, which {cls.__name__}.{key} calls,"


def _is_compiled(value: Any) -> bool:
    if is_a(value, nn.Module):
        return of_class(value, "_opt_mod_attributes") is not None or type(value).__name__ == "OptimizedModule"
    return callable(value) and stored(value, "_torchdynamo_orig_callable") is not None
