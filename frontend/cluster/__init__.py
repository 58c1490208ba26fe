"""The engine over boxes of a cluster, behind the border of `frontend.engine.interface`, and its way over brokers.

Imported by `frontend.assembly` in a gateway, and by `frontend.bridge`; alone with it this package imports `nats`.
"""
