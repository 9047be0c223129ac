"""Many copies of a model on many machines: Ray places, restarts and scales `luce serve`, and Serve stands before it.

Here: the configuration, what a node offers, the life of processes under Ray's actors, and the router that sends a
prompt to the replica that has most of it cached. Not here: anything about tokens, pages or layers; these stay in the
child processes, which are Luce as everywhere. No tensor and no object of Luce goes through Ray, only dict, str, int and
bytes. luce.cli imports this package and nothing else does; its modules run in Ray's own environment, and import of Luce
only what needs no further package.

    cluster_config   the TOML file of `luce ray`
    node_resources   what `luce doctor` finds, as resources of a node; what a placement group lacks
    pending_groups   pure: groups of processes for which no node has room; group_watch: asks Ray for them
    device_leases    which device of a node belongs to which actor
    leasing          the same as an actor of each node; this node's address
    routing_state    pure: what replicas have cached and how busy they are, and the replica for a prompt
    group_keys       which keys of blocks a group of API keys may know of
    process_guard    no child outlives the actor that started it, and no actor its node
    guarded          the program that a child begins as
    process_list     the processes of a node, written down by `up` and ended by `down`
    node             Ray's processes on this machine, their environment and their files
    tls_keys         keys of TLS between Ray's processes
    private_folder   folders for keys of processes that may be killed
    child_server     `luce serve` as a child: start, address, keys, end
    actor_guard      lets an actor end with its node, and go on without the control store
    shard_host       an actor with `luce shard` as its child, for the further devices of a replica
    replica          an actor of Serve with that child; reports what it has cached
    ingress          what clients talk to: routes requests, and passes bytes on; ingress_scaling: one on each node
    client_keys      the clients' API keys at an ingress
    relayed_stream   pure: what a client has of a stream, with which another replica goes on
    request_facts    pure: what the ingress reads of a request
    request_router   Serve's interface: the replica for a call, by the routing state, and the ingress for a request;
                     shared_routing: the state of a process
    application      ingress and replicas as an application of Serve
    serve_session    the program that talks to Ray
    actions          what the actions of `luce ray` do
"""
