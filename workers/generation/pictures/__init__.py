"""Pictures in prompts: sizes, placeholders, pixels and features of the families of models that see.

Adapters and the engine above may import it. It imports `workers.images` and the templates of `workers.generation`.
"""
