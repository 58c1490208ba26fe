"""Model families: one module per family behind the interface of `base`; `registry` imports a family when asked.

Lifecycle and operations import this package; families never import each other.
"""
