"""Numbers as people read them."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


def quantity(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1234567 → "1.23M"; with a unit a space parts them: "1.23 MB"."""
    index = 0
    while abs(value) >= 999.5 and index < len(_PREFIXES) - 1:
        value /= 1000
        index += 1
    digits = f"{value:.0f}" if index == 0 and value == int(value) else f"{value:.3g}"
    return f"{digits} {_PREFIXES[index]}{unit}" if unit else f"{digits}{_PREFIXES[index]}"


def duration(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
