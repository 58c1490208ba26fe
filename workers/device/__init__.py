"""The device: the hardware, out of memory, the watchdog, and the steps of a computation.

Everything above imports this package; adapters import `stepping`.
"""
