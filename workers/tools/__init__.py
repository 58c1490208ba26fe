"""The tool host: a process that runs code and shell commands of models in sandboxes, apart from all other processes.

Nothing else of `workers` imports this package; the package imports no other room of `workers`, and no model library.
"""
