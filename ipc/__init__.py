"""The contract between frontends and workers: the only package that both sides import."""
