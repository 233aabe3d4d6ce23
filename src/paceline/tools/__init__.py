"""Commands around a run: compare, doctor, profile, report, bench, tune, export, submit.

Nothing below imports a tool, and a run works without any of them.
"""
