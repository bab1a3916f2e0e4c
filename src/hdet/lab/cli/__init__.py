"""The command line."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the ``hdet`` command."""
    try:
        from hdet.lab.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        from hdet.errors import install_command

        print(f"hdet: {error.name} is missing. Install it: {install_command('cli')}", file=sys.stderr)
        raise SystemExit(2) from None
    from hdet.lab.cli.screen import show_warnings_plainly

    show_warnings_plainly()
    app(prog_name="hdet")
