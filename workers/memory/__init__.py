"""Where the inputs of a job are read from and its outputs are written to.

Scheduling, strategies and operations import this package.
"""
