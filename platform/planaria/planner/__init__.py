"""Which layout for which cluster: pure functions."""
