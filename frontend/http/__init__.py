"""What every HTTP route uses: bodies in, answers out, limits of values, errors, disconnects.

Protocol packages import this package; it imports no protocol.
"""
