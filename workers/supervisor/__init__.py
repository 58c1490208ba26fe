"""The process that starts and restarts workers in embedded mode.

Nothing else of `workers` imports this package.
"""
