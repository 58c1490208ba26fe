"""All structs that cross a process border, their codec, and which of them go which way.

Both sides import this package. It imports the catalog's value types and no sockets.
"""
