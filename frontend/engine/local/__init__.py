"""The frontend's end of the ZeroMQ socket: channels, routing, retries, loads on demand.

Only `frontend.engine` and the start of a frontend import this package.
"""
