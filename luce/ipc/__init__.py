"""Other processes and the transport to them: frames, shared memory, child processes, network connections.

Here: how bytes travel, and how daemons start and end. Not here: what a message asks of a shard or a drafter
(luce.remote, luce.draft). luce.remote and luce.draft call it; it calls luce.runtime.

    channel     frames on a socket: messages and their arrays
    lifecycle   the messages about a daemon's life
    arena       memory that two processes share
    child       a daemon as a child process
    parent      the end of a process with the one that started it
    tcp         daemons on other machines: TLS with a shared key
    accept      the daemon's end of it: who gets a place before it has shown the key
    heartbeat   pings a daemon
    supervisor  starts a daemon, watches its heartbeat, restarts it
"""
