"""The engine of this host, over ZeroMQ: channels to the workers, choice of a worker, retries, loads on demand.

Only the start of a frontend imports this package; all others use `frontend.engine.interface`.
"""
