"""The HTTP server of a frontend: uvicorn's parser on uvloop under Gunicorn, with deadlines and a lossless drain.

Gunicorn's settings name its worker class; the application imports `drain` and `limits` alone.
"""
