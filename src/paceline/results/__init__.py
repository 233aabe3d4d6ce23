"""The trained model of a run: `Result`, `load`, evaluation, prediction, and predictions as a table.

Promises that the code of a run is executed only if the user trusts it. Must not know
how ranks work: it asks `launch` to run a task.
"""
