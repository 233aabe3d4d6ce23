"""A trained model for other programs, with its card."""
