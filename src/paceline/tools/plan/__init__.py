"""`paceline plan`: measures a few steps here, and computes the time and the price of a run on more ranks."""
