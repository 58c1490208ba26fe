"""The engine and the directory of models that protocols call; scope, plan, answer and counting of a request.

All of the frontend may import this package. `local` is the engine over ZeroMQ: only the start of a frontend imports it.
"""
