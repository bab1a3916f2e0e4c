"""The public names of the package, which are imported when they are used."""

import ast
import subprocess
import sys
from collections import defaultdict
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


ROOT = Path(__file__).parents[2]
PLACES = {"__init__.py", "round_record.py", "steering/needs.py"}
"""Every controller may be named here, beside its own files in method/ and steering/."""
RECIPES = {
    "auto.py": {"Guard", "Thermostat", "HeldOutWeightDecay"},  # it adds a guard, and tells what was found
    "tuning.py": {"Thermostat", "HeldOutWeightDecay"},  # it chooses what is sound
    "schedules/one_cycle.py": {"Controller"},  # it asks for the paper's
    "presets.py": {"Controller"},
}
"""They choose controllers for the user."""


def names_in(path: Path) -> set[str]:
    """Give the names that the code of a file uses, without words in docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_a_controller_is_named_in_few_places():
    from hdet.round_record import Section
    from hdet.steering import STEERINGS

    source = ROOT / "src/hdet"
    sections = {kind.name: kind for kind in Section.__args__}
    files = {
        file: names_in(source / file)
        for file in (str(path.relative_to(source)) for path in source.rglob("*.py"))
        if file.split("/")[0] not in ("lab", "jax")  # JAX has its own, and the lab offers them by name
    }
    for steering in STEERINGS:
        own = {f"{kind.__module__.replace('.', '/')}.py" for kind in (steering, steering.kind)}
        allowed = PLACES | {file.removeprefix("hdet/") for file in own}
        for kind in (steering.kind, steering, sections[steering.name]):
            name = kind.__name__
            found = {file for file, names in files.items() if name in names}
            found -= {file for file in found if name in RECIPES.get(file, ())}
            found -= {"method/reference.py", "method/watches.py"}  # the readable method, for tests alone
            assert found <= allowed, name


ELSEWHERE = {
    *("Ensemble", "HeldOutWeightDecay"),  # hdet.jax has its own, which do the same
    *("Case", "Cell", "Parts", "Problem", "Row", "Training"),  # each program of research has its own
    *("GPT", "Pool", "Result"),  # those of the lab
}


def test_no_two_classes_have_one_name():
    where = defaultdict(list)
    for folder in ("src", "research"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1 and name not in ELSEWHERE} == {}
