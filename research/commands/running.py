"""What the commands of studies have in common: run what is missing, then show what is there."""

from __future__ import annotations

from collections.abc import Callable

import typer

from hdet.lab.cli.screen import Exit, Screen
from hdet.lab.pool import stop_on_signal

__all__ = ["run_and_show"]


def run_and_show(
    title: str, run: Callable[..., bool] | None, show: Callable[[], str], *, quiet: bool
) -> None:
    """Run a study with a bar, say what its records show, and exit with a code of its own if it was stopped.

    Args:
        title: of the bar.
        run: takes ``on_done`` and ``should_stop``, and tells if all is there; None shows without running.
        show: gives the tables.
        quiet: show no bar.
    """
    screen, is_complete = Screen(is_json=False, is_quiet=quiet), True
    if run is not None:
        with (
            stop_on_signal() as should_stop,
            screen.progress(1000, f"{title} (‰)", shows_loss=False) as bar,  # a sweep may grow as it runs
        ):
            is_complete = run(
                on_done=lambda done, total: bar.update(1000 * done // total), should_stop=should_stop
            )
    screen.say(show())
    if not is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)
