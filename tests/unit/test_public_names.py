"""The public names of the package, which are imported when they are used."""

import importlib
import subprocess
import sys
import warnings

import pytest

import hdet


def test_every_public_name_resolves_and_is_listed():
    assert set(hdet._MODULES) == set(hdet.__all__) - {"__version__"}
    assert set(hdet.__all__) <= set(dir(hdet))
    for name in hdet._MODULES:
        assert getattr(hdet, name).__name__.removeprefix("hdet.") == name


@pytest.mark.parametrize("name", [name for name, module in hdet._MODULES.items() if module == "hdet"])
def test_a_module_needs_no_import_of_its_own(name: str):
    command = f"import hdet; assert hdet.{name}.__all__"
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("hdet.core.reference", "train"),
        ("hdet.core.merge", "OuterMerge"),
        ("hdet.telemetry", "RoundRecord"),
        ("hdet.telemetry.tee", "Tee"),
        ("hdet.telemetry.tracker", "Tracker"),
        ("hdet.telemetry.wandb", "WandbSink"),
        ("hdet.find", "find_lr"),
        ("hdet.tasks", "Task"),
        ("hdet.report", "build_report"),
    ],
)
def test_a_path_that_has_moved_works_and_says_where_it_is(old: str, name: str):
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as caught:  # the package that it was in may warn too
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert any(f"{old} has moved: import hdet." in str(warning.message) for warning in caught)
    assert getattr(module, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hdet' has no attribute 'Nothing'"):
        _ = hdet.Nothing


def test_names_of_a_room_are_there_without_being_loaded_with_it():
    from hdet import ensemble, schedules

    assert ensemble.VirtualEnsemble is hdet.VirtualEnsemble
    assert schedules.ReplayLR is hdet.ReplayLR and schedules.export_schedule is hdet.export_schedule
    for room in (ensemble, schedules):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = room.nothing
