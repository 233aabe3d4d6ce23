"""Checkpoints: what they hold, and how they are written, published, verified, kept and found again.

Promises that a checkpoint is complete or not there, and that its files do not depend on the number of ranks. Must not
know when to save, or what is saved.
"""
