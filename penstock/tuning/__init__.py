"""`penstock tune`: finds the settings of workers, threads, batches and precision that suit this machine.

Only the command line imports this package.
"""
