"""Checkpoints: what they hold, how they are written, published, verified and kept. Nothing depends on the ranks."""
