"""The version of this installation."""

VERSION = "0.1.0"
