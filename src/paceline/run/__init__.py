"""One run folder: the names of its files, its lock, the job in it, the outcome of it.

Promises that a file is seen whole or not at all. Must not import torch to say where a file is, and must not know what
a run computes.
"""
