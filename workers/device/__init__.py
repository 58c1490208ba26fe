"""The device and its thread: what hardware there is, the loop over batches, the watchdog, memory trouble.

`workers.runtime` imports this package.
"""
