"""The mathematics of the method: pure functions on the standard library alone."""
