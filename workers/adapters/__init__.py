"""Model families behind the interface of `base`; `registry` imports a family when a model needs the family.

Lifecycle and operations import this package; families never import each other.
"""
