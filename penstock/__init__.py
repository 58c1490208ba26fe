"""The front door: the command line.

Nothing imports this package; the package may import all others.
"""
