"""Options that are the fields of a dataclass."""

import dataclasses
import inspect

from hdet.lab.cli.app import app, run
from hdet.lab.cli.options import takes
from hdet.lab.train.config import RunConfig


@dataclasses.dataclass(kw_only=True)
class Trip:
    """A trip.

    Args:
        where: Where it goes.
        days: How long
            it takes.
        bags: What is taken along.
        secret: Not an option.
    """

    where: str
    days: int = 3
    bags: dict[str, int] = dataclasses.field(default_factory=dict)
    secret: str = ""


def test_fields_are_options_with_what_the_docstring_says_of_them():
    @takes(Trip, {"": ("where",), "Luggage": ("bags", "days")}, days=None)
    def travel(by: str = "train", **settings):
        """Travel."""

    found = inspect.signature(travel).parameters
    assert list(found) == ["where", "bags", "days", "by"]  # its own last
    assert found["where"].default is inspect.Parameter.empty and found["days"].default is None
    assert found["where"].annotation.__metadata__[0].help == "Where it goes."
    assert found["days"].annotation.__metadata__[0].help == "How long it takes."
    assert found["days"].annotation.__metadata__[0].rich_help_panel == "Luggage"
    assert (found["days"].annotation.__origin__, found["bags"].annotation.__origin__) == (
        int | None,
        list[str] | None,
    )


def test_a_long_default_is_rounded_in_the_help():
    option = inspect.signature(run).parameters["spread"].annotation.__metadata__[0]
    assert option.help.endswith("; 0 keeps them equal (default: 0.111).") and option.show_default is False


def test_every_setting_of_a_run_is_an_option_with_help():
    options = inspect.signature(run).parameters
    names = {field.name for field in dataclasses.fields(RunConfig)} - {"engine"}  # torchrun says which
    assert names <= options.keys()
    assert all(options[name].annotation.__metadata__[0].help for name in names)
    assert any(command.callback is run for command in app.registered_commands)
