"""The command line."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the ``hdet`` command."""
    try:
        from hdet.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"hdet: {error.name} is missing; it comes with: pip install 'hdet[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="hdet")
