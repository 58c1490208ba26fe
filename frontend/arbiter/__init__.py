"""What runs in Gunicorn's arbiter: hooks, the settings in force, the lock of the run directory.

Gunicorn's settings, the application's start and the command line import this package. No request comes here.
"""
