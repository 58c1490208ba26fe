"""All structs that cross a process border, their codec, and which of them go which way.

Both sides import this package. The package imports the catalog's value types.
"""
