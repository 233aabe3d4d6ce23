"""Checkpoints: their contents, and how they are written, published, verified, retained and found.

Promises that a checkpoint is published complete or not at all, and that its files do not depend on the number of ranks.
Must not depend on what a step or an epoch computes.
"""
