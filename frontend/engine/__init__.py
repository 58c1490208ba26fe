"""What protocols call: the request scope, the engine and the directory of models, answers, accounting.

Protocol packages import this package, and nothing below `local`.
"""
