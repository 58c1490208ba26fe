"""The engine of this host: `directory` looks models up, `workers` waits for models, `demand` asks for their loads.

Only the start of a frontend imports this package; all others use `frontend.engine.interface`.
"""
