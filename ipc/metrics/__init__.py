"""Metric families, their files by slot, and counters that are written a little later.

Both sides import this package.
"""
