"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table_line"]


def table_line(cells: Sequence[str]) -> str:
    r"""One line of a table.

    >>> table_line(["a", "b|c"])
    '| a | b\\|c |'
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
