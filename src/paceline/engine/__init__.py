"""One exact training step: forward, backward, the sum over lanes and ranks, the update. Read `step.py` first.

Promises bitwise identical results for any number of ranks, and that a step with numbers that are not finite changes
nothing. Must not depend on the loop around it, checkpoints, the run folder or the screen.
"""
