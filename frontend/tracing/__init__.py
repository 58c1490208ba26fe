"""Spans of requests over OTLP. Nothing here but `otlp` imports OpenTelemetry, and that only when an endpoint is set."""
