"""Formats of answers: where a family of models writes its reasoning and its tool calls.

Parsers tell both from visible text as an answer streams; grammars force calls in the model's own wrapper.
"""
