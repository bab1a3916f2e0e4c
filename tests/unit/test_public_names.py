"""The public names of the package, which are imported when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

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


def test_type_checkers_see_the_same_names_from_the_same_modules():
    source = ast.parse(Path(hdet.__file__).read_text())
    block = next(node for node in source.body if isinstance(node, ast.If))
    seen = {name.name: line.module for line in block.body for name in line.names}
    assert seen == hdet._MODULES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hdet' has no attribute 'Nothing'"):
        _ = hdet.Nothing
