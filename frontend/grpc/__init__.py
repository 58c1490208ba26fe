"""The gRPC server of a frontend, beside its HTTP server: calls, streams, connections, and the handover of the port.

May be imported by the protocols' `grpc` packages and the lifespan. The arbiter may import `port` alone (NOTE: gRPC's
threads do not survive a fork).
"""
