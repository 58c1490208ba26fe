"""Answers that come piece by piece, as their readers see them, whatever process sends the pieces.

Imported by the engines: `frontend.engine.local` and `frontend.cluster`.
"""
