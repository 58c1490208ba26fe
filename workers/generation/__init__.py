"""The generation engine: paged key-value cache, scheduler, packed step, sampling, grammars, text.

Adapters, operations and strategies may import it. It imports no queue, job or socket.
"""
