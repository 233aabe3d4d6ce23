"""The search for good values of a config's keys: many runs, one study."""
