"""`paceline profile`: measures the parts of a step, and advises what to change."""
