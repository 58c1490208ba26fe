"""Lets requests in by the key in their head, and bounds them: API keys, scopes, rates, shares (`gate`).

May be imported by the HTTP and gRPC servers, the arbiter's checks, the protocols and the command line.
"""
