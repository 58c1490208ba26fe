"""`penstock embed`: the vectors of a file of texts, made by a running server, in a file that can be resumed.

Only the command line imports this package.
"""
