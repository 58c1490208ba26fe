"""Who may call what, and how often: API keys, scopes, rates, shares, decided on the head of a request (`gate`).

May be imported by the HTTP and gRPC servers, the arbiter's checks, the protocols and the command line.
"""
