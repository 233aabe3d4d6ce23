"""The exit codes by which a rank, the process it was forked from and the launcher understand each other."""

from __future__ import annotations

DONE = 85  # of a rank that has reached its end, for the fork server alone; the launcher sees 0
ENDED_EARLY = -1001  # what the launcher sees of a rank that ended with 0 by itself: by os._exit or exec
