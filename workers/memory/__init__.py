"""Places in memory where the inputs of a job are read: payloads, and shared memory of clients.

Everything above imports this package.
"""
