"""Jobs from arrival through the device to the result: admission, threads that tokenize, batches, the device thread.

The pipeline, strategies and the life cycle of models import this package.
"""
