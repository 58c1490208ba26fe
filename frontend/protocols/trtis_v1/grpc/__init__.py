"""The gRPC side of this contract: `GRPCService` on the port of the gRPC server."""
