"""Seeded random faults against one long job: what is injected, when it is over, and what must be true at the end."""
