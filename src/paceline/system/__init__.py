"""Requests to the operating system: processes, signals, memory, free disk space, paths.

Must not import anything of Paceline but its errors.
"""
