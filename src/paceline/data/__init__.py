"""The data pipeline: which samples, in which order, on which rank, as which batches."""
