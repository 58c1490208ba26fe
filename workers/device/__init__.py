"""The device and its thread, which runs the batches; the hardware, the watchdog, out of memory.

The pipeline and strategies import this package; the hardware is asked for everywhere in `workers`.
"""
