"""Tools that run on the server, in the midst of generated text.

Protocols import this package; the package imports no protocol.
"""
