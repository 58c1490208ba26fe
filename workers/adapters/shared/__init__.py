"""Parts that several model families use: tokenizing, packing, attention, pooling, precision.

Nothing here knows a model family, and nothing here imports one.
"""
