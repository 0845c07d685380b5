"""What a text asks for that names a model: a preset, a configuration or a function. Nothing is imported for it."""

import json
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.plan import MOST_LAYERS

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

_SIZES = (
    *("hidden_size", "n_embd", "d_model", *_LAYERS),
    *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"),
)
"""Sizes in Hugging Face's configurations that count something."""

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
    for name in _SIZES:
        value = found.get(name)
        counts = value if isinstance(value, list) and value else [value]  # some name one size for each layer
        if value is not None and not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(
                f"{where}: {name} = {_brief(value)}: a whole number of at least 1 is needed; mend the file"
            )
    layers, heads, groups = (
        next((value for name in names if type(value := found.get(name)) is int), 1)
        for names in (_LAYERS, ("num_attention_heads", "n_head", "num_heads"), ("num_key_value_heads", "num_kv_heads"))
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
