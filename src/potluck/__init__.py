"""Potluck runs one language model across several people's computers."""

__version__ = "0.1.0"
