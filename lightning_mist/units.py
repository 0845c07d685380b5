"""Text for bytes, seconds and rates, and bytes from text. Inside the package everything is seconds and bytes."""

import re

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*$")


def parse_bytes(value: str | int | float) -> int:
    """Bytes from a number of bytes or from text such as ``"22GiB"`` or ``"24 GB"``.

    Args:
        value: A non-negative number of bytes, or a number followed by a binary (``KiB`` .. ``TiB``) or decimal
            (``kB`` .. ``TB``) unit.

    Returns:
        The number of bytes, rounded down.

    Raises:
        ValueError: If the text is not a size, or the size is not finite or is negative.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value < float("inf"):
            raise ValueError(f"a size of {value} bytes: sizes are finite and not negative; give for example '22GiB'")
        return int(value)
    match = _BYTES.match(value) if isinstance(value, str) else None
    units = {**_BINARY, **_DECIMAL}
    if match is None or (match[2] or "B") not in units:
        raise ValueError(f"{value!r} is not a size: write a number and one of {', '.join(units)}, for example '22GiB'")
    return int(float(match[1]) * units[match[2] or "B"])


def format_bytes(value: float) -> str:
    """Bytes as text with a binary unit and at most four significant digits, for example ``"31.2 GiB"``."""
    sign, size = ("-", -value) if value < 0 else ("", value)
    for unit, scale in reversed(_BINARY.items()):
        if size >= scale and unit != "B":
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(value: float) -> str:
    """Seconds as text in the largest unit below the value, for example ``"12.3 ms"``."""
    sign, seconds = ("-", -value) if value < 0 else ("", value)
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{sign}{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{sign}{seconds:.0f} s"
    return f"{sign}{seconds / 1e-9:.3g} ns"


def format_rate(value: float, unit: str) -> str:
    """A rate as text with a decimal prefix, for example ``format_rate(1.2e12, "FLOP/s") == "1.2 TFLOP/s"``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
