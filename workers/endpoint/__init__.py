"""The worker's end of the ZeroMQ socket: sessions, dispatch, leases given.

`workers.runtime` and the book of jobs import this package.
"""
