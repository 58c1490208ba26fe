"""Models of named tensors on disk: directories, versions, configuration files, catalog entries, following changes.

Workers import this package, and `penstock/`. A model that cannot be read is an entry whose load fails with the reason.
"""
