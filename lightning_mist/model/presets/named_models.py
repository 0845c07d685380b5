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

from collections.abc import Mapping
from dataclasses import replace

from lightning_mist.model.presets.shapes import LanguageModelShape

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
