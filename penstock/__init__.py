"""Penstock's front door: the command line."""
