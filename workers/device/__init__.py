"""The device: the hardware, out of memory, and the steps of a computation with their watchdog.

Everything above imports this package; adapters import `stepping`.
"""
