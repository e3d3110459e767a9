"""The checkpoint benchmark: what is saved, the processes that save and load it, and one module per kind of work."""
