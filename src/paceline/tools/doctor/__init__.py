"""`paceline doctor`: what a machine and a config are good for, before a long run."""
