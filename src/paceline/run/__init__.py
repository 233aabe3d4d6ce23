"""One run folder: the names of its files, its lock, the job that the ranks run, and the outcome.

Promises that readers never see a partly written file. Must not import torch to name a file, and must not depend on
what a run computes.
"""
