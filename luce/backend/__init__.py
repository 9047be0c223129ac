"""Which layers run where, and running them: a plan, shards on devices, the backend that queues steps on all of them.

Called by luce.engine through the Backend protocol; calls luce.layers. A single device is a split of one.
"""
