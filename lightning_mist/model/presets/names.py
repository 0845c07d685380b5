"""What texts on a command line may name: presets, configuration files, precisions."""

from difflib import get_close_matches
from pathlib import Path

from lightning_mist.model.presets.named_models import PRESETS

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
"""Lightning's names of the precisions that can be planned for."""


def check_name(text: str) -> None:
    """Refuse what names neither a preset nor a file that is there.

    Args:
        text: The name of a preset, or the path of a configuration.

    Raises:
        ValueError: If there is no such preset or file.
    """
    if text.endswith(".json"):
        if not Path(text).exists():
            raise ValueError(f"model {text!r}: there is no such file; give the path of a config.json")
    elif text not in PRESETS:
        near = get_close_matches(text, PRESETS, n=3, cutoff=0.0)
        raise ValueError(
            f"model {text!r}: not a preset, a config.json or package.module:function; did you mean "
            f"{', '.join(map(repr, near[:-1]))} or {near[-1]!r}? Presets: {', '.join(PRESETS)}"
        )


def check_precision(precision: str) -> None:
    """Refuse a precision that is not known.

    Raises:
        ValueError: If it is not one of :data:`PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: known precisions are {', '.join(PRECISIONS)}")


def check_length(text: str, seq_len: int | None) -> int:
    """Tokens per row, which what has only sizes needs.

    Args:
        text: What the model was called.
        seq_len: Tokens per row.

    Raises:
        ValueError: If they are not given.
    """
    if seq_len is None or seq_len < 1:
        raise ValueError(f"model {text!r} with seq_len = {seq_len}: tokens per row are needed; give --seq-len 2048")
    return seq_len
