"""Generated text as all protocols of chat share it: what requests of all forms have in common, and how they run.

Protocols import this package.
"""
