"""A module and a batch to plan for, from a short text: a preset, a Hugging Face configuration, a user's function."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.model.fakes import convert_batch
from lightning_mist.model.presets import PRESETS, check_length, check_name, check_precision
from lightning_mist.model.sources.reference_decoder import LanguageModel, hollow

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}

_Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What to trace."""

    name: str
    module: nn.Module
    batch: Any
    call: Callable[[Any], Any]  # its step as a function of the batch, in the precision asked for


def open_model(
    text: str,
    *,
    batch_rows: int,
    sequence_length: int | None,
    precision: str,
    change: _Change = lambda module: module,
) -> ModelSource:
    """The module and batch that a text names.

    Args:
        text: The name of a preset, such as ``"gpt3-22b"``; the path of a Hugging Face ``config.json``; or
            ``"package.module:function"``, whose function returns a module with a ``training_step`` and a batch.
        sequence_length: Tokens of each row; presets and configurations need it, functions make their own batch.
        change: Makes of the module as built the one to trace, such as one with adapters.

    Raises:
        ValueError: If the text names nothing, or something needed is missing.
    """
    context, kept = precision_context(precision), parameter_dtype(precision)
    name, batch = text, None
    check_name(text)
    if ":" in text:
        module, batch = _from_function(text, kept, change)
        name = type(module).__name__
    else:
        length = check_length(text, sequence_length)
        tokens = torch.zeros(batch_rows, length, dtype=torch.long)
        if text.endswith(".json"):
            module = _from_configuration(Path(text), length, kept, change)
            batch = {"input_ids": tokens, "labels": tokens.clone()}
        else:
            module = hollow(lambda: change(LanguageModel(PRESETS[text], length)), dtype=kept)
            batch = tokens, tokens.clone()

    def call(batch: Any) -> Any:
        with context():
            return module.training_step(batch, 0)  # type: ignore[operator]

    return ModelSource(name=name, module=module, batch=batch, call=call)


def precision_context(precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context in which a step runs in a precision of Lightning's name; a ValueError for others."""
    check_precision(precision)
    dtype, _, mixed = precision.partition("-")
    if mixed != "mixed":
        # What a step makes out of nothing is in that precision too.
        return nullcontext if dtype == "32" else partial(_default_type, _DTYPES[dtype])
    # As under Lightning, which keeps no cast weights from one operator to the next.
    return partial(torch.autocast, "cpu", _DTYPES[dtype], cache_enabled=False)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating-point tensors are made in a type, as in Lightning's half and double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parameter_dtype(precision: str) -> torch.dtype | None:
    """What a precision makes of floating-point parameters; None where they stay as they are."""
    dtype, _, mixed = precision.partition("-")
    return None if mixed == "mixed" or dtype == "32" else _DTYPES[dtype]


def _from_function(text: str, dtype: torch.dtype | None, change: _Change) -> tuple[nn.Module, Any]:
    name, _, attribute = text.partition(":")
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {text!r} cannot be imported ({error}): write package.module:function") from error
    _check_callable(text, function)
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"model {text!r} returned {type(made).__name__}: it must return a module and a batch, "
            "`return module, batch`"
        )
    module, batch = made
    if not callable(getattr(module, "training_step", None)):
        raise ValueError(f"model {text!r} returned a {type(module).__name__} without training_step: give it one")
    # What was built on the meta device gets zeros that take no memory.
    module = hollow(lambda: change(module), dtype=dtype)
    if dtype is None:
        return module, batch
    # As Lightning's precision plugin hands it to the step.
    return module.to(dtype), convert_batch(batch, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)


def _check_callable(text: str, function: Any) -> None:
    """Refuse what cannot be called without arguments: that is a mistake in the name, not in the function."""
    if not callable(function):
        raise ValueError(
            f"model {text!r} names a {type(function).__name__}: name a function that returns a module and a batch"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are compiled do not say what they take
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            f"model {text!r} cannot be called without arguments ({error}): name a function that takes none and returns "
            "a module and a batch"
        ) from error


class _CausalStep(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def _from_configuration(path: Path, length: int, dtype: torch.dtype | None, change: _Change) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"model '{path}' needs Hugging Face transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        # Code that a configuration names is never run.
        configuration = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # its checks raise what they like
        raise ValueError(
            f"model '{path}' is not a configuration that transformers knows ({transformers.__version__}): "
            f"{_first(error)}; mend it, or write package.module:function"
        ) from error
    longest = getattr(configuration, "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(f"seq_len = {length}: '{path}' has at most {longest} positions; give --seq-len {longest}")
    names = getattr(configuration, "architectures", None) or ()
    language = [name for name in names if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))]
    if names and not language:
        raise ValueError(
            f"model '{path}' is a {names[0]}: only language models can be made from a configuration; write "
            "package.module:function for others"
        )
    cls = getattr(transformers, language[0], None) if language else None
    if language and cls is None:
        raise ValueError(
            f"model '{path}' is a {language[0]}, which transformers {transformers.__version__} does not have: update "
            "it, or write package.module:function"
        )

    def build() -> nn.Module:
        make: Any = cls if cls is not None else transformers.AutoModelForCausalLM.from_config
        return change(_CausalStep(make(configuration)))

    try:
        return hollow(build, dtype=dtype).train()
    except Exception as error:
        raise ValueError(
            f"model '{path}': transformers makes no network of it: {_first(error)}; mend its sizes"
        ) from error


def _first(error: Exception) -> str:
    """The kind of an error and its first sentence: what follows is advice for people who call transformers."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.partition('. ')[0]}".rstrip(".")


# Low-rank adapters beside the frozen layers of a network that is planned for.

_ATTENTION = ("q_proj", "v_proj", "query", "value", "query_key_value", "qkv_proj", "Wqkv", "q_lin", "v_lin")
"""What adapters are put beside where nothing is said: queries and values, fused or not, as Hugging Face names them."""


class _Adapted(nn.Module):
    """A linear layer with a low-rank path beside it (LoRA; Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        dtype = base.weight.dtype
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as those of the layer."""
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def with_adapters(module: nn.Module, rank: int, targets: Sequence[str] = ()) -> nn.Module:
    """Freeze all of a module, and put a trained adapter beside each linear layer of some names; in place.

    Args:
        rank: Width of the adapters.
        targets: Last parts of the layers' names; by default those of queries and values in attention.

    Raises:
        ValueError: If the rank is not positive, or a name is that of no linear layer.
    """
    if rank < 1:
        raise ValueError(f"lora_rank = {rank}: the width of adapters must be positive; give 8 or 16")
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linear}
    chosen = set(targets or _ATTENTION) & known
    if missing := sorted(set(targets) - known) or (not chosen and ["attention's queries and values"]):
        raise ValueError(
            f"lora_targets: no linear layer is named {', '.join(missing)}; there are {', '.join(sorted(known))}"
        )
    module.requires_grad_(False)
    for name, layer in linear.items():
        parent, _, last = name.rpartition(".")
        if last in chosen:
            setattr(module.get_submodule(parent), last, _Adapted(layer, rank))
    return module
