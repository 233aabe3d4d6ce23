"""Checkpoints: what they hold, and how they are written, published, verified, retained and found.

A checkpoint is published complete or not at all, and its files do not depend on the number of ranks. This package does
not decide when to save.
"""
