"""The trained model of a run: `Result`, `load`, evaluation, prediction, and predictions as a table.

Promises that the code of a run is executed only if the user trusts it. Must not depend on
how ranks work: `launch` runs its tasks.
"""
