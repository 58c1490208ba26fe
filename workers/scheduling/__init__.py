"""Jobs from arrival to the device: the book, the queue, batches, preparing threads.

Strategies and the runtime import this package.
"""
