"""Bringing the files of a model onto this machine, and the reasons of a failure.

Lifecycle and adapters import this package.
"""
