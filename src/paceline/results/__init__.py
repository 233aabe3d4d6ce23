"""What is done with a run that has ended or saved: `Result`, `load`, evaluation and prediction.

Promises that a run's code is executed only where its user trusts it. Must not know how ranks are started.
"""
