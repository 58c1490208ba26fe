"""The description of this server's HTTP routes, made from the rows of all tables and their structs; shown at `/docs`.

May be imported by `frontend.protocols.server_routes`, which serves the description. Imports `frontend.route_rows`.
"""
