"""Other processes and the transport to them: frames, shared memory, child processes, network connections.

Here: how bytes and processes come and go, and devices of daemons as the server sees them. Not here: what a message asks
of a shard or a drafter (luce.remote, luce.draft). luce.remote, luce.draft and luce.assembly call it; it calls
luce.runtime.

    channel     messages in frames on a socket
    messages    the messages between server and daemon
    arena       memory that two processes share
    child       a daemon's process: spawn, reason of its end
    supervisor  starts a daemon, watches its heartbeat, restarts it
    tcp         daemons over a network: TLS with a shared key
    device      a device of another process
    open        devices of the settings, here and in daemons
"""
