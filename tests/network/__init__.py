"""Ray nodes in network namespaces, joined by cables that can be pulled."""
