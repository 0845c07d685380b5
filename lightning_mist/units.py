"""Text for bytes, seconds and rates, and back. Inside the package everything is seconds and bytes."""

import math
import re

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NUMBER = r"(\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)"
_BITS = re.compile(rf"^\s*{_NUMBER}\s*([MGT])bit\s*$")
_SECONDS = re.compile(rf"^\s*{_NUMBER}\s*(ns|us|ms|s)?\s*$")
_BYTES = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*$")


def parse_bytes(value: str | int | float) -> int:
    """Bytes, rounded down, from a number of bytes or from text such as ``"22GiB"`` or ``"24 GB"``.

    Units are binary (``KiB`` .. ``TiB``) or decimal (``kB`` .. ``TB``).

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
    size = float(match[1]) * units[match[2] or "B"]
    if size == float("inf"):
        raise ValueError(f"{str(value)[:20]!r}...: sizes are finite; give for example '22GiB'")
    return int(size)


def parse_rate(value: str | int | float) -> float:
    """Bytes per second from a number or from text such as ``"300 GB/s"`` or ``"100 Gbit/s"``.

    Before ``/s`` stands a size (see :func:`parse_bytes`) or a number of ``Mbit``, ``Gbit`` or ``Tbit``.

    Raises:
        ValueError: If the text is not a rate, or the rate is not finite or is negative.
    """
    if not isinstance(value, str):
        return float(parse_bytes(value))
    amount, slash, second = value.strip().rpartition("/")
    if slash and second.strip() == "s":
        bits = _BITS.match(amount)
        if bits is not None:
            return float(bits[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[bits[2]] / 8
        try:
            return float(parse_bytes(amount))
        except ValueError:
            pass
    raise ValueError(f"{value!r} is not a rate: write for example '300 GB/s' or '100 Gbit/s'")


def parse_seconds(value: str | int | float) -> float:
    """Seconds from a number, also as text (YAML reads ``5e-5`` as text), or from text such as ``"20 us"``.

    Units are ``ns``, ``us``, ``ms`` and ``s``.

    Raises:
        ValueError: If the text is not a duration, or the duration is not finite or is negative.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _SECONDS.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a duration: write for example '20 us'")
    # Divided: 20 us is exactly the 2e-5 that a program would write.
    return float(match[1]) / {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}[match[2] or "s"]


def format_bytes(value: float) -> str:
    """Bytes as text with a binary unit and at most four significant digits, for example ``"31.2 GiB"``."""
    sign, size = ("-", -value) if value < 0 else ("", value)
    for unit, scale in reversed(_BINARY.items()):
        if size >= scale and unit != "B":
            return f"{sign}{size / scale:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_bytes_up(value: float) -> str:
    """Bytes as :func:`format_bytes` writes them, rounded up, so that whoever sets them as a limit has enough."""
    for unit, scale in reversed(_BINARY.items()):
        if value >= scale and unit != "B":
            return f"{math.ceil(10 * value / scale) / 10:.1f} {unit}"
    return f"{math.ceil(value)} B"


def format_seconds(value: float) -> str:
    """Seconds as text with three significant digits in the largest unit below the value, for example ``"12.3 ms"``."""
    sign, seconds = ("-", -value) if value < 0 else ("", value)
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * _ROUNDS_UP:
            return f"{sign}{_three_digits(seconds / scale)} {unit}"
    return f"{sign}{_three_digits(seconds / 1e-9)} ns"


def format_rate(value: float, unit: str) -> str:
    """A rate as text with a decimal prefix, for example ``format_rate(1.2e12, "FLOP/s") == "1.2 TFLOP/s"``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * _ROUNDS_UP:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


_ROUNDS_UP = 0.9995
"""From this fraction of a unit on, three digits round up to the unit: 0.9996 s is 1 s, not 1000 ms."""


def _three_digits(value: float) -> str:
    """Three significant digits, never with an exponent from 1e-4 up."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
