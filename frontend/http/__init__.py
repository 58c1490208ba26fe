"""Tools of every HTTP route: reading bodies within limits, decoding, errors, disconnects.

All above imports this package. `frontend.server` parses HTTP.
"""
