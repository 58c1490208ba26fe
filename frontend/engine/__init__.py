"""The engine and the directory of models that protocols call; plan, answer, events, kept embeddings (`caching`).

All of the frontend may import this package. `local` is the engine over ZeroMQ: only the start of a frontend imports it.
"""
