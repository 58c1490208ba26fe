"""Bases of resources: a request from its head to its answer, bodies over leased memory, health.

Protocols, the application and the routes of text import this package.
"""
