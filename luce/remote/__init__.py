"""Devices of other processes: messages between a server and its daemons, shared memory, the daemons' lives.

Here: frames on a socket (channel.py), what is said (messages.py), memory that both sides see (arena.py), a daemon's
process (child.py) and its supervision (supervisor.py), network daemons (tcp.py), devices as the server sees them
(device.py), settings to devices (open.py). What a daemon does with a message is luce.backend.daemon and
luce.backend.served, what the server asks it for is luce.backend.remote. Nothing here knows a model family: the wire
carries tensors and verbs.
"""
