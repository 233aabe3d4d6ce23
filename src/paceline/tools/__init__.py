"""The commands around a run: compare, doctor, profile, plan, report, bench, tune, export, submit and board.

They use the public names, run folders and events. No other package imports a tool, and a run works without them.
"""
