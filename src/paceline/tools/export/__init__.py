"""`paceline export`: writes a trained model for other programs, with a model card."""
