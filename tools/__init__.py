"""Checks of the repository's own rules, run by `make check`: imports, sizes, duplication."""
