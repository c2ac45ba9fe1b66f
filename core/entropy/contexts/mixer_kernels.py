"""Binary decisions, each predicted by a mixture of adaptive contexts, and the arithmetic coder that writes them.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

A symbol is a path in a binary tree. Every decision has one adaptive probability per context; their logits are added
with weights that are learned on the way, in two weight sets whose logits are averaged, and an adaptive map from
(context, logit) to probability has half of the last word. Probabilities have 22 bits and a count, which sets how fast
they move and how far they are trusted. All of it is fixed-point, so that encoder and decoder agree on every machine.

Sources: M. Mahoney, "Adaptive weighing of context models for lossless data compression" (Florida Tech CS-2005-16):
logistic mixing and adaptive probability maps, in the form of lpaq1.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer, UInt8s, UInt32s
from shrinkpoint.entropy.contexts.lowrank_kernels import clamp
from shrinkpoint.runtime.jit import jit_part

__all__ = ["BROAD", "LOGIT_LIMIT", "Decisions", "Logits", "Mixer", "code_symbol", "finish", "new_mixer"]

LOGIT_LIMIT = 2047
"""Largest logit, in 1/256."""

BROAD = 3
"""Buckets to each side of zero that choose weights."""

_COUNT_LIMIT = 400
_MAP_CELLS = 33
_WEIGHT_START = 18000  # of 65536
_PROBABILITY_LIMIT = 16  # of 65536, the least that either outcome keeps
_ROUNDS_LIMIT = 2047
_COUNTS = np.arange(1024)
_SHARES = 131072 // (2 * _COUNTS + 3)  # 1 / (count + 1.5) in 2^-16: how far a probability moves
_TRUST = 512 * _COUNTS // (2 * _COUNTS + 3)  # count / (count + 1.5) in 1/256: how far it is believed
_RATES = 3 + 2048 // (np.arange(_ROUNDS_LIMIT + 1) + 32)  # how far weights move


class Decisions(NamedTuple):
    """The binary tree of the alphabet.

    Attributes:
        children: int32 (nodes, 2), a node, or ``-1 - symbol``.
        outcomes: uint8 (256, depth), the decisions on the path to each symbol.
        start: int64 (nodes,), share of outcome 1 in 2^-22.
    """

    children: Int32s
    outcomes: UInt8s
    start: Int64s


class Logits(NamedTuple):
    """Tables of the logistic function.

    Attributes:
        stretch: int32 (4096,), logit in 1/256 of a probability in 1/4096.
        squash: int32 (4096,), probability in 2^-16 of a logit + 2048.
    """

    stretch: Int32s
    squash: Int32s


class Mixer(NamedTuple):
    """What is learned on the way, and where the symbol at hand looks it up.

    Attributes:
        slots: uint32 (contexts * nodes,), probability in 2^-22 and count of each decision in each context.
        weights: int32 (sets * nodes, inputs), in 2^-16; the last set is everybody's.
        rounds: int32 (sets * nodes,), how often each was moved.
        maps: int32 (kinds * nodes, cells), probability in 2^-16 by logit.
        bases: int64 (inputs,), the first slot of each input's context; the caller's to fill. Input 0 has none.
        touched: int64 (inputs,), scratch.
        inputs: int32 (inputs,), scratch.
    """

    slots: UInt32s
    weights: Int32s
    rounds: Int32s
    maps: Int32s
    bases: Int64s
    touched: Int64s
    inputs: Int32s


@jit_part
def new_mixer(tree: Decisions, squash: Int32s, contexts: int, inputs: int, kinds: int) -> Mixer:
    """Before the first symbol; ``contexts`` is how many all inputs have together, ``kinds`` how many maps a decision has."""
    nodes = tree.start.size
    sets = (2 * BROAD + 2) * nodes
    return Mixer(
        _start_slots(tree, contexts),
        np.full((sets, inputs), _WEIGHT_START, dtype=np.int32),
        np.zeros(sets, dtype=np.int32),
        _start_maps(squash, nodes * kinds),
        np.zeros(inputs, dtype=np.int64),
        np.zeros(inputs, dtype=np.int64),
        np.zeros(inputs, dtype=np.int32),
    )


@jit_part
def _start_slots(tree: Decisions, contexts: int) -> UInt32s:
    nodes = tree.start.size
    slots = np.empty(contexts * nodes, dtype=np.uint32)
    for i in range(contexts):
        for node in range(nodes):
            slots[i * nodes + node] = tree.start[node] << 10
    return slots


@jit_part
def _start_maps(squash: Int32s, count: int) -> Int32s:
    maps = np.empty((count, _MAP_CELLS), dtype=np.int32)
    for cell in range(_MAP_CELLS):
        maps[:, cell] = squash[min(max((cell - 16) * 128, -LOGIT_LIMIT), LOGIT_LIMIT) + 2048]
    return maps


@jit_part
def _logit(inputs: Int32s, weights: Int32s) -> Integer:
    total = np.int64(0)
    for k in range(inputs.size):
        total += np.int64(inputs[k]) * np.int64(weights[k])
    logit: Integer = clamp(total >> 16, -LOGIT_LIMIT, LOGIT_LIMIT)
    return logit


@jit_part
def _learn(inputs: Int32s, weights: Int32s, rounds: Int32s, which: Integer, error: Integer) -> None:
    """Move a set of weights along the gradient of the code length; ``error`` in 2^-16."""
    seen = np.int64(rounds[which])
    rounds[which] = min(seen + 1, _ROUNDS_LIMIT)
    change = (error * _RATES[seen]) >> 4
    for k in range(inputs.size):
        weights[k] += (np.int64(inputs[k]) * change + (1 << 13)) >> 14


@jit_part
def _gather(
    slots: UInt32s, bases: Int64s, node: Integer, stretch: Int32s, touched: Int64s, inputs: Int32s
) -> None:
    """The logit of every context, less where it has seen little."""
    for k in range(bases.size):
        index = bases[k] + node
        slot = np.int64(slots[index])
        touched[k] = index
        inputs[k] = (np.int64(stretch[slot >> 20]) * _TRUST[slot & 1023]) >> 8
    inputs[0] = stretch[np.int64(slots[node]) >> 20]


@jit_part
def _update(slots: UInt32s, touched: Int64s, outcome: Integer) -> None:
    target = outcome * 4194303
    for k in range(touched.size):
        slot = np.int64(slots[touched[k]])
        count, p = slot & 1023, slot >> 10
        p += ((target - p) * _SHARES[count]) >> 16
        slots[touched[k]] = p << 10 | min(count + 1, _COUNT_LIMIT)


@jit_part
def _refine(cells: Int32s, logit: Integer, squash: Int32s) -> Integer:
    """Half the mixture's own probability, half what the map has seen at its logit; in 2^-16, never certain."""
    place = (logit + 2048) << 5
    low, part = place >> 12, place & 4095
    mapped = (np.int64(cells[low]) * (4096 - part) + np.int64(cells[low + 1]) * part) >> 12
    mean = (np.int64(squash[logit + 2048]) + mapped) >> 1
    probability: Integer = clamp(mean, _PROBABILITY_LIMIT, (1 << 16) - _PROBABILITY_LIMIT)
    return probability


@jit_part
def _remember(cells: Int32s, logit: Integer, target: Integer) -> None:
    place = (logit + 2048) << 5
    low, part = place >> 12, place & 4095
    cells[low] += ((target - cells[low]) * (4096 - part)) >> 18
    cells[low + 1] += ((target - cells[low + 1]) * part) >> 18


@jit_part
def _code_bit(
    coder: Int64s, probability: Integer, stream: UInt8s, decoding: bool, outcome: Integer
) -> Integer:
    """Narrow the interval to the outcome, which is read from the code when decoding; past its end, zeros are read."""
    low, high = coder[0], coder[1]
    span = high - low
    middle = low + (span >> 16) * probability + (((span & 0xFFFF) * probability) >> 16)
    if decoding:
        outcome = np.int64(1) if coder[2] <= middle else np.int64(0)
    if outcome:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) & 0xFF000000 == 0:
        if decoding:
            coder[2] = (coder[2] << 8) & 0xFFFFFFFF
            if coder[3] < stream.size:
                coder[2] |= stream[coder[3]]
        elif coder[3] < stream.size:
            stream[coder[3]] = high >> 24
        coder[3] += 1
        low = (low << 8) & 0xFFFFFFFF
        high = (high << 8) & 0xFFFFFFFF | 255
    coder[0], coder[1] = low, high
    return outcome


@jit_part
def code_symbol(
    mixer: Mixer,
    tree: Decisions,
    logits: Logits,
    kind: Integer,
    bucket: Integer,
    coder: Int64s,
    stream: UInt8s,
    decoding: bool,
    symbol: Integer,
) -> Integer:
    """Code a symbol as its path through the tree, or follow the code to one; learn from every decision.

    Args:
        mixer: ``bases`` set for this symbol.
        tree: of the alphabet.
        logits: tables.
        kind: which of a decision's maps has its say.
        bucket: which weights mix, 0 to 2 * `BROAD`.
        coder: of `range_coder_kernels.new_coder`.
        stream: what does not fit is dropped, but counted.
        decoding: whether `symbol` is ignored, and found.
        symbol: one of the tree's.

    Returns:
        The symbol.
    """
    # taken out of the tuples once: numba counts references every time
    slots, weights, rounds, maps, bases, touched, inputs = mixer
    children, outcomes, _ = tree
    stretch, squash = logits
    nodes = children.shape[0]
    node, depth, outcome = np.int64(0), 0, np.int64(0)
    while node >= 0:
        if not decoding:
            outcome = np.int64(outcomes[symbol, depth])
        _gather(slots, bases, node, stretch, touched, inputs)
        narrow, broad = bucket * nodes + node, (2 * BROAD + 1) * nodes + node
        first, second = _logit(inputs, weights[narrow]), _logit(inputs, weights[broad])
        logit = (first + second) >> 1
        cells = maps[kind * nodes + node]
        probability = _refine(cells, logit, squash)
        outcome = _code_bit(coder, probability, stream, decoding, outcome)
        target = outcome * 65535
        _remember(cells, logit, target)
        _learn(inputs, weights[narrow], rounds, narrow, target - squash[first + 2048])
        _learn(inputs, weights[broad], rounds, broad, target - squash[second + 2048])
        _update(slots, touched, outcome)
        node = np.int64(children[node, outcome])
        depth += 1
    return -1 - node


@jit_part
def finish(coder: Int64s, stream: UInt8s) -> None:
    """One byte identifies the interval, whose ends differ in the first one; zeros follow."""
    for i in range(4):
        if coder[3] < stream.size:
            stream[coder[3]] = (coder[0] + 0xFFFFFF) >> 24 & 0xFF if i == 0 else 0
        coder[3] += 1
