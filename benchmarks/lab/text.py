"""Numbers and tables for pages and pictures: three digits, and the unit beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def three(value: float) -> str:
    """Return a number with three significant digits and no exponent.

    >>> three(638872.6), three(0.98765), three(12.0), three(0.000123456)
    ('639,000', '0.988', '12', '0.000123')
    """
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    text = f"{rounded:.3g}"
    return f"{rounded:.10f}".rstrip("0") if "e" in text else text


def size(num_bytes: float) -> str:
    """Return bytes in the unit that reads best, by powers of 1000.

    >>> size(0), size(840), size(115_343_360)
    ('0 B', '840 B', '115 MB')
    """
    units = ("B", "KB", "MB", "GB", "TB")
    power = 0
    while num_bytes >= 999.5 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{three(num_bytes)} {units[power]}"


def table(header: Sequence[object], rows: Iterable[Iterable[object]], right: int = 0) -> str:
    """Return a Markdown table whose columns from `right` on are aligned to the right."""
    ruler = ["---" if i < right else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, ruler, *rows))


def cell(value: object) -> str:
    """Return a value of a record for a table."""
    text = three(value) if isinstance(value, float) else str(value)
    return text.replace("\n", "<br>").replace("|", "\\|")
