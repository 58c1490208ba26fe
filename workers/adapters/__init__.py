"""Model families: one module per family behind the `Adapter` interface of `workers.adapters.base`.

`registry.resolve` turns a family name into its class and imports it only then, so importing this package
imports no torch.
"""
