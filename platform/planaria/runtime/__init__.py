"""The Ray actors and the life cycle of process groups."""
