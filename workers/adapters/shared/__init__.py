"""Code that several model families use: loading, tokenizing, packing, attention, pooling, options.

Nothing here knows a model family, and nothing here imports one.
"""
