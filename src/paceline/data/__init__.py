"""Samples to batches on the device: the order of samples, lanes, loaders, streams, augmentation, scaling.

Promises that what a lane of a step holds is a function of the config, the seed and the step number, whatever the
number of ranks. Must not know models or optimizers.
"""
