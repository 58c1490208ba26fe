"""The worker's end of the ZeroMQ socket: sessions, messages in, results out, leases given.

`workers.runtime` and the table of jobs import this package.
"""
