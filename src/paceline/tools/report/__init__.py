"""A page about runs, for when they are over: `paceline report`. It reads the run folder and starts nothing."""
