"""A service under mixed work and many faults, for long: `python -m bench.soak`."""
