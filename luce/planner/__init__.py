"""How fast a placement of a model's layers is, and which one is the fastest. Pure: figures in, placements out.

Here: what devices and links can do, what a model's layers ask of them, the predicted time of layers, shards and whole
placements, and the search over all placements. Not here: the measuring of devices, and the sizes of a file's layers.

    figures      what a device and a link can do
    known_cards  figures of cards by their data sheets, for devices that are not there
    problem      a model's layers, the load, the devices: what a placement is predicted and searched for
    layer_time   seconds of a layer on a device, by what they are spent on
    draft_time   seconds of a step's proposals, where tokens are drafted
    shard_tables seconds and bytes of every range of layers on a device
    prediction   seconds of a whole placement
    labels       partial placements, and which of them no other one beats
    search       the fastest placement
"""
