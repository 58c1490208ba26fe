"""The HTTP server of a frontend: uvicorn's parser on uvloop under Gunicorn, with deadlines and a lossless drain.

Gunicorn's hooks import `serving`; the application imports `drain`, the gRPC server `drain` and `state`.
"""
