"""The worker's end of the ZeroMQ socket: sessions, dispatch, leases given.

`workers.runtime` and the table of jobs import this package.
"""
