"""The worker: the process that owns one device, holds models on it and runs batches for the frontends."""
