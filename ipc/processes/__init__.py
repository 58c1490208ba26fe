"""Processes of one server: paths and locks, starting children, knowing the living from the dead.

All processes import this package.
"""
