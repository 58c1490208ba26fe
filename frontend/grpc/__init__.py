"""The gRPC server of a frontend: calls, streams, connections, and the handover of the port.

The protocols' `grpc` packages and the lifespan import this package; the arbiter imports `port` alone.
"""
