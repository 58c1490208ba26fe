"""Stands for packages of extras, in processes whose PYTHONPATH is this directory.

Imported by nobody else.
"""
