"""Models known by name.

Sizes up to 40b (and ``llama-350m``, ``llama-70b``) are those of the Mist artifact (Dazz993/Mist, commit d69e530,
``benchmark/mist/configs/model``): a vocabulary of 50304 tokens, no biases, no dropout, a head of its own. The others,
with the same blocks:

* ``gpt3-6.7b``, ``gpt3-175b``: Brown et al., Language Models are Few-Shot Learners (arXiv:2005.14165), table 2.1.
* ``gpt3-39b``, ``gpt3-76b``, ``gpt3-145b``: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
  Clusters (arXiv:2104.04473), table 1.
* ``llama-65b``: Touvron et al., LLaMA (arXiv:2302.13971), table 2.
* ``llama3-8b``, ``llama3-70b``, ``llama3-405b``: Dubey et al., The Llama 3 Herd of Models (arXiv:2407.21783), table 3:
  8 heads of keys and values, a vocabulary of 128256 tokens, whole heads rotated. ``llama-405b`` is another name of
  the last.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning_mist.plan import MOST_LAYERS


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelShape:
    """Sizes and choices of a decoder-only language model without biases and dropout.

    Attributes:
        ffn: Inner width of the feed-forward part.
        key_value_heads: Heads of keys and values, a divisor of ``heads``, made by matrices of their own; ``None`` for
            as many as of queries, made by one matrix together with these.
        feed_forward: ``"gelu"`` (two matrices) or ``"swiglu"`` (three; Shazeer, 2020).
        parallel: Whether attention and feed-forward read the same norm and are added together (Wang and Komatsuzaki,
            2021).
        rotary_fraction: Part of each head that is rotated by position (Su et al., 2021); 0 for a table of learned
            positions.
        tied: Whether the head is the token table.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    parallel: bool = False
    rotary_fraction: float = 0.0
    tied: bool = False

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def rotated_width(self) -> int:
        """Entries of each head that are rotated by position."""
        return int(self.head_width * self.rotary_fraction) // 2 * 2

    @property
    def key_value_width(self) -> int:
        """Width of all keys, or all values, together."""
        return (self.key_value_heads or self.heads) * self.head_width


# name: hidden, layers, heads, and the inner width of llama, which is four times the hidden one of gpt3 and falcon
_SIZES = {
    "1.3b": (2048, 24, 16, 5632),
    "2.7b": (2560, 32, 32, 6912),
    "7b": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "20b": (6144, 44, 64, 16384),
    "22b": (6144, 48, 64, 16384),
    "40b": (8192, 48, 64, 22016),
}
_LLAMA_3 = {"8b": (4096, 32, 32, 14336), "70b": (8192, 80, 64, 28672), "405b": (16384, 126, 128, 53248)}


def _gpt3(hidden: int, layers: int, heads: int) -> LanguageModelShape:
    return LanguageModelShape(hidden=hidden, ffn=4 * hidden, layers=layers, heads=heads, vocabulary=50304)


def _falcon(hidden: int, layers: int, heads: int) -> LanguageModelShape:
    return replace(_gpt3(hidden, layers, heads), parallel=True, rotary_fraction=0.25)


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> LanguageModelShape:
    plain = _gpt3(hidden, layers, heads)
    return replace(plain, ffn=ffn, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=0.25)


def _llama_3(hidden: int, layers: int, heads: int, ffn: int) -> LanguageModelShape:
    return replace(_llama(hidden, layers, heads, ffn), key_value_heads=8, vocabulary=128256, rotary_fraction=1.0)


PRESETS: Mapping[str, LanguageModelShape] = {
    **{f"gpt3-{size}": _gpt3(*shape[:3]) for size, shape in _SIZES.items()},
    "gpt3-6.7b": _gpt3(4096, 32, 32),
    "gpt3-8b": _gpt3(4096, 40, 32),
    "gpt3-39b": _gpt3(8192, 48, 64),
    "gpt3-76b": _gpt3(10240, 60, 80),
    "gpt3-145b": _gpt3(12288, 80, 96),
    "gpt3-175b": _gpt3(12288, 96, 96),
    **{f"falcon-{size}": _falcon(*shape[:3]) for size, shape in _SIZES.items()},
    **{f"llama-{size}": _llama(*shape) for size, shape in _SIZES.items()},
    "llama-350m": _llama(1024, 24, 16, 2816),
    "llama-65b": _llama(8192, 80, 64, 22016),
    "llama-70b": _llama(8192, 80, 64, 28672),
    **{f"llama3-{size}": _llama_3(*shape) for size, shape in _LLAMA_3.items()},
    "llama-405b": _llama_3(*_LLAMA_3["405b"]),
}
"""Name to shape: ``gpt3-*`` (GPT-2's block), ``falcon-*``, ``llama-*`` and ``llama3-*`` of several sizes."""


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
"""Lightning's names of the precisions that can be planned for."""


def check_precision(precision: str) -> None:
    """Refuse by a ValueError a precision that is not one of :data:`PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: known precisions are {', '.join(PRECISIONS)}")


def check_length(text: str, seq_len: int | None) -> int:
    """Tokens per row, which what has only sizes needs; a ValueError if they are not given."""
    if seq_len is None or seq_len < 1:
        raise ValueError(f"model {text!r} with seq_len = {seq_len}: tokens per row are needed; give --seq-len 2048")
    return seq_len


# What a text asks for that names a model: a preset, a configuration or a function. Nothing is imported for it.

SIZE_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"),
}
"""What Hugging Face's configurations call sizes (names of their classes' arguments in transformers 4 and 5)."""

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_name(text: str) -> None:
    """Refuse by a ValueError what names no preset, no configuration that can be read, and no function."""
    if ":" in text:
        _check_function(text)
    elif text.endswith(".json"):
        read_configuration(Path(text))
    elif text not in PRESETS:
        near = get_close_matches(text, PRESETS, n=3, cutoff=0.0)
        raise ValueError(
            f"model {text!r}: not a preset, a config.json or package.module:function; did you mean "
            f"{', '.join(map(repr, near[:-1]))} or {near[-1]!r}? Presets: {', '.join(PRESETS)}"
        )


def _check_function(text: str) -> None:
    """Refuse what cannot name a function of somebody's own, whose import might do anything."""
    module, _, function = text.partition(":")
    is_file = module.endswith(".py") or "/" in module
    if is_file or not _FUNCTION.fullmatch(text):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        way = f"write the module's name, {dotted}:{function}" if is_file else "for example train:make_model"
        raise ValueError(f"model {text!r} does not name a function as package.module:function does; {way}")
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and not (Path(f"{root}.py").exists() or Path(root).is_dir()):
        raise ValueError(
            f"model {text!r}: {root} is a module of Python itself, which makes no network; name a function of your "
            "own that returns a module and a batch"
        )


def read_configuration(path: Path) -> Mapping[str, Any]:
    """What a Hugging Face ``config.json`` states.

    Raises:
        ValueError: If there is no such file, it is not JSON with keys, or a size in it does not count anything.
    """
    where = f"model {str(path)!r}"
    if not path.is_file():
        raise ValueError(f"{where}: there is no such file; give the path of a config.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last for text nested beyond any configuration
        raise ValueError(f"{where} is not JSON ({error}): give the path of a Hugging Face config.json") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds {_brief(found)}: a configuration is an object with keys, {{...}}")
    _check_sizes(found, where)
    kind, classes = found.get("model_type"), found.get("architectures")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f'{where}: model_type = {_brief(kind)}: text is needed, such as "llama"')
    if classes is not None and not (isinstance(classes, list) and all(isinstance(item, str) for item in classes)):
        raise ValueError(f'{where}: architectures = {_brief(classes)}: names are needed, such as ["LlamaForCausalLM"]')
    return found


def _check_sizes(found: Mapping[str, Any], where: str) -> None:
    for name in chain.from_iterable(SIZE_NAMES.values()):
        value = found.get(name)
        counts = value if isinstance(value, list) and value else [value]  # some name one size for each layer
        if value is not None and not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(
                f"{where}: {name} = {_brief(value)}: a whole number of at least 1 is needed; mend the file"
            )
    layers, heads, groups = (
        next((value for name in SIZE_NAMES[what] if type(value := found.get(name)) is int), 1)
        for what in ("layers", "heads", "key_value_heads")
    )
    if layers > MOST_LAYERS:
        raise ValueError(
            f"{where}: {layers:,} layers: nothing is planned or estimated for more than {MOST_LAYERS:,}; write "
            "package.module:function for a module that puts several in one"
        )
    if heads % groups:
        raise ValueError(f"{where}: {heads} heads of queries share {groups} of keys and values: these must divide them")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
