"""Tests of stores run for a directory, and those that say so for brokers too."""

from tests.fakes.places import kept_in

__all__ = ["kept_in"]
