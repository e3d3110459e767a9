"""Contrastive losses side by side: what each rank needs as the world grows."""
