"""The contract between frontends and workers.

All packages import this package; `ipc` imports the standard library and a few libraries that `make check` lists.
"""
