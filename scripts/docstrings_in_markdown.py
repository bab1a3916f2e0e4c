"""An extension of griffe: docstrings are written for Sphinx, and the site reads Markdown."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe


class DocstringsInMarkdown(griffe.Extension):
    """Turn roles and equations of reStructuredText into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every object that has one."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    r"""One docstring.

    >>> to_markdown("``spread`` is :math:`\\alpha`, see :class:`hdet.Ensemble`")
    '`spread` is $\\alpha$, see `hdet.Ensemble`'
    >>> print(to_markdown("Use it so::\n\n    step(loss)\n\nAfter it."))
    Use it so:
    <BLANKLINE>
    ```python
    step(loss)
    ```
    <BLANKLINE>
    After it.
    """
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text) + "\n"
    text = re.sub(r"^( *)\.\. math::(.*\n(?:(?:\1 +.*)?\n)*)", _equation, text, flags=re.MULTILINE)
    text = re.sub(
        r"^( *)(\.\. code-block:: python|\S.*::)\n\n((?:(?:\1 +.*)?\n)+)", _code, text, flags=re.MULTILINE
    )
    return re.sub(r"^( *)>>> .*\n(?:\1.+\n)*", _doctest, text, flags=re.MULTILINE).rstrip()


def _equation(match: re.Match[str]) -> str:
    indent, body = match[1], inspect.cleandoc(match[2]).split()
    return f"{indent}$$ {' '.join(body)} $$\n\n"


def _code(match: re.Match[str]) -> str:
    indent, before = match[1], match[2]
    lines = inspect.cleandoc(match[3]).splitlines()
    said = "" if before.startswith("..") else f"{indent}{before[:-1]}\n\n"
    block = "\n".join(f"{indent}{line}".rstrip() for line in ["```python", *lines, "```"])
    return f"{said}{block}\n\n"


def _doctest(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}{indent}```\n"
