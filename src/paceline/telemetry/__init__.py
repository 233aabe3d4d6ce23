"""What a run tells: `events.jsonl` is the truth, everything else reads it. Nothing here decides anything."""
