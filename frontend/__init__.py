"""The side of the clients: HTTP (Falcon under Gunicorn) and gRPC, without torch.

Only the command line imports this package; the package never imports `workers`.
"""
