"""The HTTP server of a frontend: uvicorn's parser on uvloop under Gunicorn, with deadlines and a lossless drain.

1. `worker.PenstockWorker` is what `gunicorn.conf.py` names as worker class and where it puts the `limits.ServerLimits`.
2. `serving.DrainingServer` starts the application, listens and, on SIGTERM, drains.
3. `protocol.PenstockProtocol` is one connection, `cycle.Cycle` one request on it; a WebSocket handshake makes a
   `websocket.PenstockWebSocket` of a connection.
4. `sweep.Sweeper` looks at all connections a few times per second and ends those that are past a deadline.
5. `drain.DRAIN` tells the application that the drain began.
"""
