"""Models of named tensors on disk: directories, versions, configuration files, and a catalog entry for each version.

Both sides import this package. A model that cannot be read is an entry whose load fails with the reason.
"""
