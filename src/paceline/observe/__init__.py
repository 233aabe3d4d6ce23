"""The reports of a run: events, progress, failures and hangs, the screen, and the sinks of events.

Inside a rank: `progress`, `watchdog` and the writer in `events`. Inside the launcher: `screen/` shows a run,
`sinks/` sends its events elsewhere. Both sides use `event_types`, `failures`, `hangs`, `rank_log` and `bottleneck`,
and communicate only through the files of the run folder.

Promises that reporting never changes or delays a run; only the watchdog ends one, when it hangs. Must not decide
anything about training.
"""
