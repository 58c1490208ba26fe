"""Places in memory: where the inputs of a job are read, and where its outputs are written.

Scheduling, strategies and operations import this package.
"""
