"""The public names of the package, which are imported when they are used."""

import subprocess
import sys

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
