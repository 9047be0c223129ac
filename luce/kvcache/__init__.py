"""Keys and values: which page belongs to which sequence, where it lies, and which ones later sequences can use again.

Here: the page tables, paging between devices and host memory (KVFlash), the prefix tree with its checkpoints, eviction,
and the RAM tier; luce.kvcache.disk is the tier behind them. Not here: when a checkpoint is saved (luce.engine,
luce.text), and the kernels that read and write pages (luce.layers). luce.engine calls this package on its thread; the
package calls luce.backend through the Backend protocol.

    page_table    which sequence holds which page of which group: reserve, extend, release, the page views of a step
    paging        KVFlash: which pages of a long sequence are resident; swaps the others out and in
    policies      score pages by importance
    draft_scorer  a small model that scores pages by its attention
    prefix_tree   pure: token prefixes in nodes of one page, and the checkpoints at which a sequence can resume
    block_keys    keys of prompts in blocks of a page, for routers, without their tokens
    block_log     which blocks have come into the prefix tree and left it
    memory_tier   pages on the devices or in host memory, checkpoints with their states, eviction by bytes
    prefix_cache  PrefixCache: saves checkpoints, and finds one for a prompt in either tier
    restorer      restores a prefix into the slot of a sequence
    saver         checkpoints on their way to the disk, in small steps between the steps of sequences

A page has five types on its way to the disk and back. PageNode (prefix_tree) names it by its tokens. SavedState
(luce.shard.saved_state) holds a copy in the host memory of the processes that drive the devices, and hands it out as
plain arrays by name. Frame (disk.part) is an array in a file. StoredTensor (disk.reader) joins the frames of several
files to one array that is to be decoded. StatePiece (luce.shard.saved_state) holds decoded arrays with the slot, the
pages and the layers that they belong to.
"""
