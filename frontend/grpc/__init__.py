"""The gRPC server of a frontend: calls, streams, connections, and the handover of the port.

The protocols' `grpc` packages and the lifespan import this package; the arbiter imports `port` alone.
"""

import os

# PERF: gRPC's core reads sockets in the thread that waits for its events, and not in further threads, which hand over
# what they read: 12 % of an empty rpc (ADR 46). The core looks at the variable when the library is first imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
