"""`paceline doctor`: checks a machine and a config before a long run."""
