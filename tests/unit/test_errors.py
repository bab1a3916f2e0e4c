"""Hints that name a command which works."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from hdet.errors import install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            '{"dir_info": {"editable": true}, "url": "file:///home/me/my%20hdet"}',
            "pip install -e '/home/me/my hdet[cli]'",
        ),
        ('{"dir_info": {}, "url": "file:///home/me/hdet"}', "pip install '/home/me/hdet[cli]'"),
        ('{"archive_info": {}, "url": "file:///tmp/hdet.whl"}', "pip install 'hdet[cli]'"),
        (None, "pip install 'hdet[cli]'"),
    ],
)
def test_the_command_installs_from_where_hdet_came(monkeypatch, origin, command):
    installed = SimpleNamespace(read_text=lambda name: origin)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert install_command("cli") == command


def test_the_command_where_hdet_is_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("cli") == "pip install 'hdet[cli]'"
