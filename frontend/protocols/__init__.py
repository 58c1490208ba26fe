"""One package per wire contract: each parses requests, calls the engine, and renders answers. None imports another.

May be imported by the application, the gRPC server's lifespan and the description of the API, through `registry`.
"""
