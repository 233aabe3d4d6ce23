"""A run on several hosts: a coordinator, agents on the other hosts, and the authenticated messages between them.

Promises that messages of a peer are never unpickled or executed. Must not depend on models or data.
"""
