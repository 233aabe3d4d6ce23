"""Worlds, data sets, models, configs and run folders that tests of several folders share."""
