"""Tools of every HTTP route: reading bodies within limits, decoding, sending answers, errors, disconnects.

Protocol packages import this package; it imports no protocol. `frontend.server` parses HTTP.
"""
