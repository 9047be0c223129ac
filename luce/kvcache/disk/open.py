"""Opens the disk tier of a loaded model."""

from __future__ import annotations

from pathlib import Path

from luce.backend.layersplit import LayerSplitBackend
from luce.config.settings import Config
from luce.gguf.reader import GGUFFile
from luce.kvcache.disk import fingerprint, manifest
from luce.kvcache.disk.expansion import SnapshotLimits
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.tier import DiskTier


def open_disk_tier(
    directory: Path, file: GGUFFile, backend: LayerSplitBackend, config: Config, *, template: str, features: int
) -> DiskTier:
    """The disk tier of the prefix cache. Snapshots of other files and settings have other fingerprints.

    `template`: the chat template. `features`: most bytes of a checkpoint's features for drafters.
    """
    resident = backend.capacity.max_resident_pages
    meaning = {
        "format": str(manifest.FORMAT),
        "--cache-type-k": config.cache_type_k,
        "--cache-type-v": config.cache_type_v,
        # Values of positions after the first `resident` pages depend on this number.
        "--kvflash": "off" if resident is None else f"{resident} pages",
    }
    if config.prompt_precision != "fp16":
        meaning["--prompt-precision"] = config.prompt_precision
    if config.shard_activations != "f32":
        # Keys, values and states of layers in daemons are computed from activations of fewer bits.
        meaning["--shard-activations"] = config.shard_activations
    if config.kv_cache_placement == "exact":
        layers = (
            f"{part.device} {part.layers.start}..{part.layers.stop - 1}"
            + "".join(f", experts of {layer} on the CPU" for layer in part.offloaded)
            for part in backend.devices
        )
        meaning["--kv-cache-placement exact"] = ", ".join(layers)
    texts = {"the chat template": template}
    known = fingerprint.recorded_digest(file.paths, directory) is not None

    def identify() -> Fingerprint:
        found = fingerprint.recorded_digest(file.paths, directory)
        found = found or fingerprint.content_digest(file.paths, directory)
        # The digest is that of the paths: snapshots of this model must not get the digest of a newer file.
        for part in file.files:
            part.check_path()
        return Fingerprint.of(found, meaning, texts, name=config.alias[0] if config.alias else file.name)

    capacity = backend.capacity
    return DiskTier(
        directory,
        budget=config.kv_cache_budget << 20,
        identify=identify,
        known=known,
        layers=capacity.layers,
        limits=SnapshotLimits.of(capacity, features=features),
    )
