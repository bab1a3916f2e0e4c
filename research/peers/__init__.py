"""What a user could do instead: every method under one interface, at the same budget."""

from research.peers import (
    alrao,
    averaging,
    finders,
    grid,
    hypergradient,
    l4,
    many_models,
    packages,
    pbt,
    pbt_ray,
    plain,
    range_test,
)
from research.peers.base import Method, Outcome

__all__ = ["DEFAULTS", "METHODS", "Method", "Outcome"]

_FAMILIES = (
    grid,
    plain,
    range_test,
    packages,
    hypergradient,
    l4,
    alrao,
    pbt,
    pbt_ray,
    averaging,
    many_models,
    finders,
)

METHODS: dict[str, Method] = {method.name: method for family in _FAMILIES for method in family.METHODS}
"""By name, in the order of the table."""

DEFAULTS = tuple(method.name for method in METHODS.values() if method.is_default)
"""Names of those that a comparison has where none are named."""
