"""The loading benchmark: the same pairs through several loaders, each in a process group of its own."""
