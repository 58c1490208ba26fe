"""Shared memory: arenas, blocks, leases, and tensors as bytes.

Both sides import this package. The process that writes an arena owns the arena.
"""
