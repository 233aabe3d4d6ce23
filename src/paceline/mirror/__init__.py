"""Mirrors: copies of runs on another disk or in an object store, written while a run trains, and read back.

Owns what is copied, in which order, and how it is verified; the process that copies; and the download of a mirrored
run. Promises that a mirrored checkpoint is complete or not one at all, that no error of a store ends or delays a run,
and that the mirror of one run is never overwritten by another. Must not depend on how ranks work.
"""
