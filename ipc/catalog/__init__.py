"""What may be served: catalog entries, repositories of tensor models, their configuration, following changes.

Both sides import this package.
"""
