"""Data sets and pretrained models by name: where their files are downloaded from and stored, and how they are read.

A downloaded file of a data set is used only if its checksum is correct. Does not depend on training.
"""
