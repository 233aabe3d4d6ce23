"""`paceline tune`: a search for good values of config keys. Each trial is a separate run."""
