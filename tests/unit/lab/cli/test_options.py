"""Options that are the fields of a dataclass."""

import dataclasses
import inspect

import pytest

from hdet.lab.cli.app import app, run
from hdet.lab.cli.options import takes
from hdet.lab.train.config import RunConfig


@dataclasses.dataclass(kw_only=True)
class Trip:
    where: str
    """Where it goes.

    More about it."""
    days: int = 3
    """How long
    it takes."""
    bags: dict[str, int] = dataclasses.field(default_factory=dict)
    """What is taken along."""


def test_fields_are_options_with_the_sentences_under_them():
    @takes(Trip, days=None)
    def travel(bags: list[str] | None = None, by: str = "train", **settings):
        """Travel."""

    found = inspect.signature(travel).parameters
    assert list(found) == ["where", "days", "bags", "by"]  # its own last
    assert found["where"].default is inspect.Parameter.empty and found["days"].default is None
    assert found["where"].annotation.__metadata__[0].help == "Where it goes."
    assert found["days"].annotation.__metadata__[0].help == "How long it takes."
    assert found["days"].annotation.__origin__ == int | None


def test_a_long_default_is_rounded_in_the_help():
    option = inspect.signature(run).parameters["spread"].annotation.__metadata__[0]
    assert option.help.endswith("; 0 keeps them equal (default: 0.111).") and option.show_default is False


@pytest.mark.parametrize("field", dataclasses.fields(RunConfig), ids=lambda field: field.name)
def test_every_setting_of_a_run_is_an_option_with_help(field):
    option = inspect.signature(run).parameters[field.name]
    assert option.annotation.__metadata__[0].help
    assert any(command.callback is run for command in app.registered_commands)
