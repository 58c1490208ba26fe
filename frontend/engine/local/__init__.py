"""The engine of this host: `engine` also looks models up, `routing` chooses workers, `demand` asks for loads.

Only the start of a frontend imports this package; all others use `frontend.engine.interface`.
"""
