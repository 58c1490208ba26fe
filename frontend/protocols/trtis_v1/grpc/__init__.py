"""TensorRT Inference Server v1 over gRPC: the methods of `GRPCService`, which take a `Call` and a message.

May be imported by `frontend.protocols.registry`, in frontends only, since it imports gRPC.
"""
