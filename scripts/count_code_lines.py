"""Count lines of code: neither blank, nor comment, nor docstring.

python scripts/count_code_lines.py [FOLDER]     # src/hdet by default
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    r"""How many lines of a module hold code.

    >>> code_lines('"Words."\n\nx = 1  # one\n')
    1
    """
    words = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in _NO_CODE]
    return len({line for lines in code for line in lines} - words)


def main() -> None:
    """Print the lines and files of each room, and of all."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src/hdet")
    lines, files = Counter[str](), Counter[str]()
    for path in sorted(root.rglob("*.py")):
        room = "/".join(path.relative_to(root).parts[:2]) if "lab" in path.parts else ""
        room = room or path.relative_to(root).parts[0]
        lines[room] += code_lines(path.read_text(encoding="utf-8"))
        files[room] += 1
    for room, count in lines.most_common():
        print(f"{count:6d} lines in {files[room]:3d} files  {room}")
    print(f"{lines.total():6d} lines in {files.total():3d} files")


if __name__ == "__main__":
    main()
