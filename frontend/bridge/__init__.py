"""The process of a box that runs work of a cluster on the workers of its host.

Imported by nobody: `python -m frontend.bridge` runs it, as `penstock bridge` does.
"""
