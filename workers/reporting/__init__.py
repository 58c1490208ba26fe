"""What a worker tells of itself: metrics, statistics, traces.

The runtime imports this package, which looks at all below.
"""
