"""Requests to the operating system: processes, signals, memory, free disk space, paths.

Must not import other parts of Paceline except its errors.
"""
