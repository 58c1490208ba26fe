"""Tiny models with random weights in the file layout of published checkpoints, built on demand."""
