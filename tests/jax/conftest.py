"""Eight virtual devices, and float64 in every test. Both must be said before JAX starts."""

import os
from importlib.util import find_spec

import pytest

from tests.helpers.needed import needed

if find_spec("jax"):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"


@pytest.fixture(autouse=True)
def float64():
    jax = needed("jax")
    with jax.enable_x64(True):
        yield
