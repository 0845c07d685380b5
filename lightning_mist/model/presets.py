"""Models known by name.

Their sizes are those of the Mist artifact (Dazz993/Mist, commit d69e530, ``benchmark/mist/configs/model``). All have a
vocabulary of 50304 tokens, no biases, no dropout, and a head of its own.
"""

from collections.abc import Mapping

from lightning_mist.model.shapes import LanguageModelShape

_VOCABULARY = 50304

# name: (hidden, layers, heads); the inner width of gpt3 and falcon is four times the hidden width
_SIZES = {
    "1.3b": (2048, 24, 16),
    "2.7b": (2560, 32, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "20b": (6144, 44, 64),
    "22b": (6144, 48, 64),
    "40b": (8192, 48, 64),
}

_LLAMA_FFN = {
    "1.3b": 5632,
    "2.7b": 6912,
    "7b": 11008,
    "13b": 13824,
    "20b": 16384,
    "22b": 16384,
    "40b": 22016,
}


def _gpt3(hidden: int, layers: int, heads: int) -> LanguageModelShape:
    return LanguageModelShape(hidden=hidden, ffn=4 * hidden, layers=layers, heads=heads, vocabulary=_VOCABULARY)


def _falcon(hidden: int, layers: int, heads: int) -> LanguageModelShape:
    return LanguageModelShape(
        hidden=hidden,
        ffn=4 * hidden,
        layers=layers,
        heads=heads,
        vocabulary=_VOCABULARY,
        parallel=True,
        rotary_fraction=0.25,
    )


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> LanguageModelShape:
    return LanguageModelShape(
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        vocabulary=_VOCABULARY,
        feed_forward="swiglu",
        norm="rmsnorm",
        rotary_fraction=0.25,
    )


PRESETS: Mapping[str, LanguageModelShape] = {
    **{f"gpt3-{size}": _gpt3(*shape) for size, shape in _SIZES.items()},
    "gpt3-8b": _gpt3(4096, 40, 32),
    **{f"falcon-{size}": _falcon(*shape) for size, shape in _SIZES.items()},
    **{f"llama-{size}": _llama(*shape, _LLAMA_FFN[size]) for size, shape in _SIZES.items()},
    "llama-350m": _llama(1024, 24, 16, 2816),
    "llama-70b": _llama(8192, 80, 64, 28672),
}
"""Name to shape: ``gpt3-*`` (GPT-2's block), ``falcon-*`` and ``llama-*`` of several sizes."""
