"""Benchmarks: one command each, ratios taken within one run, JSON under `benchmarks/results/`.

`python -m benchmarks` runs all of them; see `benchmarks/README.md`.
"""
