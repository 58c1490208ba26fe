"""The engine and the directory of models that protocols call; the scope of a request, its plan, answer and end.

All of the frontend may import this package. `local` is the engine over ZeroMQ: only the start of a frontend imports it.
"""
