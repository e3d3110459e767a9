"""Planaria: elastic, fault-tolerant training of vision-language models on Ray."""

__version__ = "0.1.0"
