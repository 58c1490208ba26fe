"""The description of this server's HTTP routes, made from structs and tables of operations, and shown at `/docs`.

`operation` may be imported by the protocols; the rest by the application and the command line.
"""
