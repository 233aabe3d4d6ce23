"""A run on several hosts: a coordinator, agents on the other hosts, and the authenticated messages between them.

Promises that nothing a peer sends is unpickled or executed. Must not know models or data.
"""
