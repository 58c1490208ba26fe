"""Jobs from arrival to the device: admission to the queue, threads that tokenize, waiting jobs, batches.

The pipeline, strategies, the device and the life cycle of models import this package.
"""
