"""Hugging Face vision-language models: units, tensor-parallel rules, initialisation."""
