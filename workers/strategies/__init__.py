"""How a kind of job takes its turns on the device: one batch, a step of a sequence, parts of a stream.

The pipeline imports this package.
"""
