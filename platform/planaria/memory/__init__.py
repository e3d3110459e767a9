"""State in memory: snapshots that outlive their processes, and their copies on other nodes."""
