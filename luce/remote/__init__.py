"""Shards in other processes: the engine's messages, the server's side and the daemon's side.

Here: RemoteShard, which turns the verbs of a shard into messages; the daemon's session and the shards that it serves;
the layout of the memory that both share. Not here: sockets, frames and the lives of processes (luce.ipc). luce.backend
calls RemoteShard, `luce shard` runs the daemon; the package calls luce.ipc and luce.shard. The wire carries tensors and
verbs; no model family is known here.

    shard             RemoteShard: the server's side of a shard
    shard_groups      what its groups of verbs do: saved states, ranking, ends
    rpc               requests and their answers, which come in the same order
    saved_state       saved state that lies in a daemon's memory
    activation_codec  activations in messages: float32, float16, bfloat16
    shared_layout     what lies where in the shared memory
    daemon            the daemon's session: answers messages until the server is gone
    daemon_shard      the layers that a daemon serves
    validate          checks every request before it reaches a kernel
"""
