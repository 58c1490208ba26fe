"""The HTTP side: Falcon (ASGI) under Gunicorn. Never imports torch or the workers."""
