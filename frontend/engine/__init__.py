"""What protocols call: the engine and the directory of models, planned work, answers, the scope of a request.

All of the frontend may import this package. `local` is the engine over ZeroMQ: only the start of a frontend imports it.
"""
