"""Small state that the processes of one server share: loads by name, poison, regions.

Both sides import this package.
"""
