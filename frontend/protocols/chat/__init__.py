"""Chat and plain completions in the form of OpenAI, and the control of models and the system beside them.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports no other protocol.
"""
