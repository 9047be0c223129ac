"""Builds the layers of gated DeltaNet: names their tensors, and orders their heads."""

from __future__ import annotations

import numpy as np

from luce.layers.deltanet import DeltaNetLayer
from luce.layers.state import DeltaState
from luce.layers.tensors import tensor_name
from luce.layers.weights import WeightLoader
from luce.models.spec import GatedDeltaNet, ModelSpec
from luce.ops.deltanet import DeltaWeights
from luce.runtime.device import Device

#: more than a prompt's chunk and the verified rows of all sequences together
MOST_ROWS = 1 << 14


def delta_net(
    device: Device, weights: WeightLoader, model: ModelSpec, index: int, spec: GatedDeltaNet, state: DeltaState
) -> DeltaNetLayer:
    """The layer of a spec, with the tensors of layer `index`."""
    if spec.grouped:
        return _grouped(device, weights, model, index, spec, state)
    hidden, inner, heads = model.hidden, spec.value_heads * spec.head_dim, spec.value_heads
    names = [tensor_name(index, part) for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")]
    return DeltaNetLayer(
        device,
        inputs=weights.matrix(names, hidden, [spec.channels, inner, heads, heads]),
        out=weights.matrix([tensor_name(index, "ssm_out")], inner, [hidden]),
        weights=DeltaWeights(
            conv=weights.filters(tensor_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels),
            decay=weights.vector(f"blk.{index}.ssm_a", heads),
            dt_bias=weights.vector(f"blk.{index}.ssm_dt.bias", heads),
            norm=weights.vector(tensor_name(index, "ssm_norm"), spec.head_dim),
            eps=model.norm_eps,
            key_heads=spec.key_heads,
        ),
        state=state,
    )


def _grouped(
    device: Device, weights: WeightLoader, model: ModelSpec, index: int, spec: GatedDeltaNet, state: DeltaState
) -> DeltaNetLayer:
    """The layer of a file whose value heads are grouped by key head.

    The layer's head p is the file's head order[p], whose rows go there. The columns of ssm_out stay, as a quant
    block may hold those of several heads; results go to them.
    """
    hidden, inner, d, heads = model.hidden, spec.value_heads * spec.head_dim, spec.head_dim, spec.value_heads
    readers = heads // spec.key_heads
    order = np.arange(heads).reshape(spec.key_heads, readers).T.ravel()
    keys, values = 2 * spec.key_heads * d, [range(head * d, (head + 1) * d) for head in order.tolist()]
    alphas, betas = (
        [range(at, at + 1) for at in (order // readers * 2 * readers + order % readers + first).tolist()]
        for first in (readers, 0)
    )
    inputs = weights.reordered(
        [
            (tensor_name(index, "attn_qkv"), range(keys), *(range(keys + v.start, keys + v.stop) for v in values)),
            (tensor_name(index, "attn_gate"), *values),
            (tensor_name(index, "ssm_ba"), *alphas, *betas),
        ],
        hidden,
    )
    conv = device.download(weights.filters(tensor_name(index, "ssm_conv1d"), spec.conv_kernel, spec.channels))
    channels = np.concatenate([np.arange(keys), *(keys + np.arange(v.start, v.stop) for v in values)])
    places = np.arange(MOST_ROWS)[:, None] * heads + np.argsort(order)
    return DeltaNetLayer(
        device,
        inputs=inputs,
        out=weights.matrix([tensor_name(index, "ssm_out")], inner, [hidden]),
        weights=DeltaWeights(
            conv=device.upload(np.ascontiguousarray(conv[channels])),
            decay=device.upload(device.download(weights.vector(f"blk.{index}.ssm_a", heads))[order]),
            dt_bias=device.upload(device.download(weights.vector(f"blk.{index}.ssm_dt.bias", heads))[order]),
            norm=weights.vector(tensor_name(index, "ssm_norm"), d),
            eps=model.norm_eps,
            key_heads=spec.key_heads,
        ),
        state=state,
        places=device.upload(places.astype(np.int32)),
    )
