"""One exact training step: forward, backward, the sum over lanes and ranks, the update. Read `step.py` first.

Promises the same bits at any number of ranks, and that a step with numbers that are not finite
changes nothing. Must not know the loop around it, checkpoints, the run folder or the screen.
"""
