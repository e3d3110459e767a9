"""Checkpoints in and out: Hugging Face directories, and what torch.distributed.checkpoint has saved."""
