"""What is asked of the operating system: processes, signals, memory, free space, paths.

Must not know anything of Paceline's other rooms but its errors.
"""
