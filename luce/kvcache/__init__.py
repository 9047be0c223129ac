"""Keys and values: which page belongs to which sequence, where it lies, and which ones later sequences can use again.

Here: the page tables, paging between devices and host memory (KVFlash), the prefix tree with its checkpoints, eviction,
and the RAM tier; luce.kvcache.disk is the tier behind them. Not here: when a checkpoint is worth taking (luce.engine,
luce.text), and the kernels that read and write pages (luce.layers). luce.engine calls this package on its thread; the
package calls luce.backend through the Backend protocol.

    page_table    which sequence holds which page of which group: reserve, extend, release, the page views of a step
    paging        KVFlash: which pages of a long sequence stay on the devices, and the moves of the others
    policies      what ranks pages by importance
    draft_scorer  a small model that ranks pages by its attention
    prefix_tree   pure: token prefixes in nodes of one page, and the checkpoints at which a sequence can resume
    pools         the page tables as the prefix cache sees them
    memory_tier   pages on the devices or in host memory, checkpoints with their states, eviction by bytes
    prefix_cache  PrefixCache: saves prefixes and restores them into the slots of sequences that share them
    saver         checkpoints on their way to the disk, in pieces between steps
"""
