"""Spans of requests over OTLP; only `otlp` imports OpenTelemetry, and only when an endpoint is set.

The engine and the start of a frontend import this package.
"""
