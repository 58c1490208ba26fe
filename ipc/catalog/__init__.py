"""What may be served: catalog entries, versions of repository models, their configuration.

Both sides import this package.
"""
