"""The speed promises, measured: `python -m benchmarks`."""
