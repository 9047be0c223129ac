"""Shards in daemons: their messages, the server's side and the daemon's side.

Here: RemoteShard, which turns the verbs of a shard into requests; devices in daemons as the server sees them; the
session of a daemon and the layers that it holds. Not here: sockets, frames and processes (luce.ipc), and drafters in
daemons (luce.draft). luce.backend and luce.draft call it, and `luce shard` runs the daemon; it calls luce.ipc and
luce.shard. Messages have tensors and verbs; nothing here knows a model family.

    open              opens the devices that the settings name, here and in daemons
    device            a device in another process
    messages          the messages about layers
    probe             figures of daemons before they load: of their devices, and of the link to them
    shard             RemoteShard: the server's side of a shard
    shard_groups      its groups of verbs: saved states, page ranking, token table and head
    rpc               requests and their responses, which arrive in the same order
    saved_state       a saved state in a daemon's memory
    activation_codec  activations in messages: float32, float16, bfloat16
    mask_codec        masks in messages: each in its shortest form
    shared_layout     the layout of shared memory
    daemon            a daemon's session: handles requests until the server is gone
    service           what a session holds, layers or a drafter: dispatches requests to handlers
    daemon_shard      the layers that a daemon holds
    announced         steps in a daemon between their announcement and the response
    validate          checks requests before they reach a kernel
"""
