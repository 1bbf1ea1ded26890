"""Measurements: each module is a program, `python -m bench.NAME`."""
