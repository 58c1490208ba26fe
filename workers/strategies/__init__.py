"""How a kind of job takes its turn on the device: one batch, a step of a sequence, parts of a stream.

The device thread imports this package.
"""
