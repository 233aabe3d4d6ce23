"""From samples to batches on the device: sources, order, lanes, loaders, iterable data sets, augmentation, scaling.

Guarantees that the samples of a lane in a step are a function of the config, the seed and the step number, for any
number of ranks. Must not depend on models or optimizers.
"""
