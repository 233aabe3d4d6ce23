"""`paceline plan`: measures a few steps here, and computes time, price and memory of a run for other numbers of ranks."""
