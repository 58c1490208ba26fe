"""What runs in Gunicorn's arbiter: the settings in force, the lock of the run directory, what is announced.

Only hooks, the application's start and the command line import this package.
"""
