"""Which layers run where, and running them: a plan, shards on devices, the backend that runs a step through them.

Called by luce.engine through the Backend protocol; calls luce.layers. A single device is a split of one.
"""
