"""`penstock verify`: compares our adapters with the reference library of each family.

Only the command line imports this package.
"""
