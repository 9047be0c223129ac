"""A family's spec turned into layers with weights and state on one device. Called by luce.backend; calls luce.ops.

A layer is a callable of (rows, step). Layers allocate their own weights, KV pools and recurrent states when they are
built; page tables and slots come with each step.
"""
