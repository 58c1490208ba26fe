"""Downloading, finding and checking the files of a model, and classifying failed loads.

Lifecycle and adapters import this package.
"""
