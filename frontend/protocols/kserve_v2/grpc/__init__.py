"""KServe v2 over gRPC: `GRPCInferenceService`, one module for each group of its rpcs.

`service` is the table of methods; each takes a `frontend.grpc.call.Call` and a message, and gives the response.
"""
