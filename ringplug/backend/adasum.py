"""Adasum: a sum of gradients that does not add up what they have in common. Layer 3.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. Two vectors
become ``(1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b``: their sum when they are orthogonal, their
mean when they are equal. Ranks combine in a binary tree, neighbours first.

Every node of the tree is a linear combination of the ranks' vectors, so its dot products follow
from those of the vectors. One exchange gives each rank a share of all vectors, one small sum
completes their dot products, every rank works out the tree's coefficients, and one gather
completes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ringplug.backend.buffers import Buffer, ReduceOp, accumulator, convert, split_evenly
from ringplug.backend.reduction import exchange_shares
from ringplug.backend.transport import Transport

__all__ = ["allreduce_adasum", "coefficients"]

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


def allreduce_adasum(transport: Transport, buffer: Buffer, bounds: Sequence[slice]) -> None:
    """In place: every tensor in `buffer` becomes the Adasum of the ranks' tensors.

    Args:
        transport: Its size is a power of two.
        buffer: Floats.
        bounds: The tensors in the buffer; each is combined by itself.
    """
    size = transport.size
    if size == 1:
        return
    rows, counts = exchange_shares(transport, buffer)
    start = split_evenly(buffer.size, size)[transport.rank].start
    wide = np.empty(rows.shape, accumulator(buffer.dtype))
    convert(rows.reshape(-1), wide.reshape(-1))
    places = [_inside(tensor, start, rows.shape[1]) for tensor in bounds]
    grams = np.zeros((len(bounds), size, size), np.float64)
    for at, place in enumerate(places):
        part = wide[:, place].astype(np.float64)
        grams[at] = part @ part.T
    transport.allreduce(grams.reshape(-1), ReduceOp.SUM)
    share = np.empty(rows.shape[1], wide.dtype)
    for gram, place in zip(grams, places, strict=True):
        weights = coefficients(gram).astype(wide.dtype)
        np.matmul(weights, wide[:, place], out=share[place])
    result = np.empty(share.size, buffer.dtype)
    convert(share, result)
    transport.allgather(result, buffer, counts)


def coefficients(gram: Matrix) -> Matrix:
    """The weight of each rank's vector in the result.

    Args:
        gram: ``[n, n]``, the vectors' dot products; n is a power of two.

    Returns:
        ``[n]``.
    """
    nodes = list(np.eye(len(gram)))
    while len(nodes) > 1:
        nodes = [_pair(a, b, gram) for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


def _pair(a: Matrix, b: Matrix, gram: Matrix) -> Matrix:
    dot, norm_a, norm_b = a @ gram @ b, a @ gram @ a, b @ gram @ b
    weight_a = 1 - dot / (2 * norm_a) if norm_a > 0 else 1.0
    weight_b = 1 - dot / (2 * norm_b) if norm_b > 0 else 1.0
    pair: Matrix = weight_a * a + weight_b * b
    return pair


def _inside(tensor: slice, start: int, length: int) -> slice:
    """Where a tensor lies in a share that begins at `start`."""
    low = min(max(tensor.start - start, 0), length)
    return slice(low, max(low, min(tensor.stop - start, length)))
