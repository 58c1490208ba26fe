"""`penstock bench`: load on a running server, and the figures that the load gives.

Only the command line imports this package.
"""
