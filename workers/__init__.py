"""The process that owns one device, holds models there, and runs batches for the frontends.

Only the command line imports this package; the package never imports `frontend`.
"""
