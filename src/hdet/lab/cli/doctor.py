"""``hdet doctor``."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from hdet.lab.cli.options import Json
from hdet.lab.cli.output import Exit, Screen


def doctor(
    is_json: Json = False,
) -> None:
    """Check this machine.

    Shows versions, backends and optional packages, and lets two processes train together.
    """
    from hdet.lab.train.doctor import examine

    screen = Screen(is_json=is_json, is_quiet=False)
    with screen.console.status("two processes are training together"):
        checks = examine()
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    table = Table("what", "", "found", box=None, pad_edge=False)
    for check in checks:
        detail = check.detail + (f"\n→ {check.remedy}" if check.remedy and check.status != "ok" else "")
        table.add_row(check.name, f"[{colours[check.status]}]{check.status}[/]", detail.replace("[", "\\["))
    screen.show(table)
    screen.give({"checks": [asdict(check) for check in checks]})
    raise typer.Exit(Exit.FAILED if any(check.status == "error" for check in checks) else Exit.OK)
