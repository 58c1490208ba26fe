"""What a worker tells of itself: metrics, statistics, traces.

The runtime, the device thread and the table of jobs import this package.
"""
