"""Penstock's front door: version and command line."""

__version__ = "0.1.0"
