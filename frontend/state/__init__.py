"""State of clients that outlives requests: files, skills, sessions, approvals, in the state directory.

May be imported by `frontend.services`, `frontend.assembly`, `frontend.agent` and `frontend.protocols`.
"""
