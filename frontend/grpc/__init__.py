"""The gRPC server of a frontend, beside its HTTP server and over the same engine.

1. `address` checks `grpc.bind` in the arbiter and keeps the port for this server's frontends.
2. `server` starts one grpc.aio server in each frontend after the fork, and drains it; all listen on one port.
3. `service` is what a protocol brings: the methods of a service, and what each answers. `unary` and `streaming` do for
   every method what no method should do itself: access, ids, trace, deadline, counting, errors.
4. `wire` keeps large tensors out of the protobuf library, which would copy each of them several times.

NOTE: nothing here but `address` and `succession` may be imported in the arbiter: gRPC's threads do not survive a fork.
"""
