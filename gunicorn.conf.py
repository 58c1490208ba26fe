"""Gunicorn's settings for Penstock: `gunicorn -c gunicorn.conf.py` starts the whole server.

All values come from Penstock's own settings (server.yaml, PENSTOCK_SECTION__FIELD); the hooks live in
frontend/arbiter/hooks.py.
"""

from frontend.arbiter import hooks
from frontend.http import listeners
from frontend.server import serving
from ipc import addresses

_config = hooks.read_settings()
hooks.hide_notify_socket()

wsgi_app = "frontend.app:create()"
bind = listeners.addresses(_config.server)
workers = _config.frontend_count
worker_class = hooks.worker_class(_config)
keepalive = int(_config.server.keepalive_s)
graceful_timeout = int(_config.server.graceful_timeout_s)
timeout = 30
backlog = addresses.BACKLOG
preload_app = False
control_socket_disable = True
loglevel = _config.log.level
logger_class = serving.ServerLogger

on_starting = hooks.on_starting
when_ready = hooks.when_ready
pre_fork = hooks.pre_fork
post_fork = hooks.post_fork
on_reload = hooks.on_reload
on_exit = hooks.on_exit
