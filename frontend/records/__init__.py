"""What is kept of requests: their ends, counts, times, and the recent ones that the live page shows.

The engine and everything above import this package.
"""
