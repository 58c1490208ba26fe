"""Gunicorn's settings for Penstock: `gunicorn -c gunicorn.conf.py` starts the whole server.

All values come from Penstock's own settings (server.yaml, PENSTOCK_SECTION__FIELD); the hooks live in
frontend/hooks.py.
"""

from frontend import hooks, listeners

_config = hooks.read_settings()
hooks.hide_notify_socket()

wsgi_app = "frontend.app:create()"
bind = listeners.addresses(_config.server)
workers = _config.frontend_count
worker_class = hooks.worker_class(_config)
keepalive = int(_config.server.keepalive_s)
graceful_timeout = int(_config.server.graceful_timeout_s)
timeout = 30
backlog = 2048
preload_app = False
control_socket_disable = True
proc_name = "penstock"
loglevel = _config.log.level

on_starting = hooks.on_starting
on_reload = hooks.on_reload
on_exit = hooks.on_exit
