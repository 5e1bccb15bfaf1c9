"""Units: bytes, seconds, tokens and FLOPs inside; converted only where a person reads them."""

GIB = 1024**3
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


def gib(num_bytes: float) -> str:
    """`12.3 GiB`."""
    return f"{num_bytes / GIB:.1f} GiB"


def size(num_bytes: float) -> str:
    """Of a file: `12.3 GiB`, and `8.1 MiB` or `2.5 KiB` where that would be a small part of one."""
    mib = num_bytes / 1024**2
    return gib(num_bytes) if mib >= 102.4 else f"{mib:.1f} MiB" if mib >= 0.1 else f"{1024 * mib:.1f} KiB"


def count(number: float) -> str:
    """A count a person reads at a glance: `950`, `12.4k`, `6.7B`."""
    number = float(f"{number:.3g}")  # rounded first: 999.9 million are 1B
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def processes(number: int) -> str:
    """`1 process`, `2 processes`."""
    return f"{number} process{'' if number == 1 else 'es'}"


def steps(number: int) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} step{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`45 s`, `12 min 3 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
