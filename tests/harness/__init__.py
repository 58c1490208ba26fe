"""Runs real servers in tests: Gunicorn, supervisor and workers, on 127.0.0.1, with everything under one directory."""
