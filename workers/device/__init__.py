"""The device and its thread: what hardware there is, the loop over batches, the watchdog, memory trouble.

The pipeline and strategies import this package; the hardware is asked for everywhere in `workers`.
"""
