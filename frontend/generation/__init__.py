"""Generated text as all protocols of chat share it: events of a stream, and what requests of all forms have in common.

Protocols and `frontend.engine` may import it. It imports no protocol.
"""
