"""Several machines: hosts join one server with a token, and lend it their devices.

identity       a host's key and certificate, and the TLS settings that accept pinned certificates only
join_token     what lets one host join once: its text, the digests that the coordinator keeps, a limit on guesses
cluster_files  what a host keeps of a cluster on its disk
saved_members  the members, for a coordinator that starts again
membership     who is a member, and what follows from each event; pure
wire           what coordinator, members and the `luce cluster` commands send
link           the connection between coordinator and member over which the others are asked for
addresses      what a token says where the coordinator is
cluster_status what the commands, the server and the metrics show of members and placement
discovery      how a coordinator is found on the local network
coordinator    the server's side: joins, members, and connections to their devices
gate           who gets through the coordinator's port
member         a host's side: joins, connects, and serves layers
lent_memory    the memory of a member's devices
member_peer    the connections to a member's devices, as their supervisor sees them
model_files    a model file by its fingerprint
weight_source  the coordinator's file, for members that lack it or compare their own
member_weights a member's weights: its own file, or what it gets
partial_model  files of which a part is there, on a member's disk
admin          the socket that the `luce cluster` commands use

`luce serve --cluster` and `luce join` call it; it starts nothing without them.
"""
