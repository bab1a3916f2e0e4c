"""Draw the figures of docs/theory.md: ``python -m research.theory [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path

from research.theory import collinear, gain, horizon, positive

FIGURES = {
    "collinear": collinear.draw,
    "positive": positive.draw,
    "gain": gain.draw,
    "horizon": horizon.draw,
}


def main(folder: Path) -> None:
    """Draw all figures into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        path = folder / f"theory-{name}.png"
        draw().savefig(path, dpi=130, metadata={"Software": None})
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/figures"))
