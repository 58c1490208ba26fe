"""Jobs from arrival to the device: intake, the table of jobs, preparing threads, what waits, queue and batches.

The pipeline, strategies, the device and the life cycle of models import this package.
"""
