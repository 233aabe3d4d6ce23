"""One rank of a run, from its start to its end. Read `main.py` first.

Owns the order of operations: build data, model and step, restore a checkpoint, train in the managed loop or in the
user's own, evaluate, save, write the result. Promises that every decision that could differ between ranks is made
once and shared. Must not depend on which launcher started the ranks.
"""
