"""Slice-indexed state: boxes of global tensors, durable checkpoints."""
