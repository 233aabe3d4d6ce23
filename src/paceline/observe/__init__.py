"""What a run reports: events, progress, the screen, logs, failures and hangs, and where events are sent.

Promises that reporting never changes, delays or ends a run. Must not decide anything about training.
"""
