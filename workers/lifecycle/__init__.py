"""How a model comes to this worker and leaves it again: load, failure, eviction, LoRA adapters, changed files.

`workers.runtime` imports `models` and `workers.main` the catalog's opening; the rest is for this package.
"""
