"""KServe v2 over gRPC: the methods of `GRPCInferenceService`, which take a `Call` and a message.

May be imported by `frontend.protocols.registry`, in frontends only, since it imports gRPC.
"""
