"""Data sets and pretrained models by name: where their files come from and are kept, and how they are read.

Promises that a file is used only if its checksum is right. Must not know about training.
"""
