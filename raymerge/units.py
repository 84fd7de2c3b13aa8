"""Human-readable bytes and seconds; inside raymerge bytes are ints."""

from __future__ import annotations

import re
from fractions import Fraction

_FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 10**3), ("IB", 2**10))
}
_LARGEST = 2**63 - 1
_DIGITS = 40
SIZE_FORM = r"^\s*[0-9]+(\.[0-9]+)?\s*(([KkMmGgTt][Ii]?)?[Bb])?\s*$"
"""What ``parse_size`` takes, for those who can only compare a text with a pattern."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of ``"4GiB"``, ``"5GB"`` or ``1048576`` (KB..TB, KiB..TiB); ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size; write it like 4GiB or 5GB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative; write a size like 4GiB or 5GB")
        return text
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write it like 4GiB, 512MiB or 5GB")
    size = Fraction(match.group(1)) * _FACTORS[unit] if len(match.group(1)) <= _DIGITS else _LARGEST + 1
    if size > _LARGEST:
        raise ValueError(f"{text[:30]!r} is more than any disk holds; write a size like 4GiB or 5GB")
    return int(size)


def format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


_DURATION = re.compile(r"(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s?)?")


def parse_duration(text: str) -> float:
    """Seconds of ``"90"``, ``"90s"``, ``"30m"``, ``"2h"`` or ``"1h30m"``; ValueError otherwise."""
    match = _DURATION.fullmatch(text.strip().lower())
    parts = [None, None, None] if match is None else list(match.groups())
    try:
        seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=True) if part)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _LARGEST:
        raise ValueError(f"{text[:30]!r} is not a duration")
    return seconds


def format_duration(seconds: float) -> str:
    """``3725`` as ``"1:02:05"``, ``0.34`` as ``"0.3 s"``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
