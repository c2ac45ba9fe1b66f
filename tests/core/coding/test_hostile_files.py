"""Whole chains of files whose checksums are right and whose contents are hostile: every codec decodes or refuses them.

Sections and parameters of the golden chains are changed, and the files are written again, with checksums of what is in them now.
Kernels check no bounds: one that trusted a section would end this process, hang, or take memory without end.
"""

import random
from dataclasses import replace

import pytest
from support.chains import decode_chain
from support.golden import CASES, chain_of
from support.mutations import mutate, mutate_json
from support.payloads import limited_memory

from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ChainError, FormatError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

MOST_MEMORY = 2 * 2**30
"""What decoding a small file may take at most, beyond what the process has anyway."""


def changed_entry(entry: Entry, rng: random.Random) -> Entry:
    """With one to three changes in its sections or parameters."""
    encoded = entry.encoded
    for _ in range(rng.randint(1, 3)):
        names = [name for name, section in encoded.sections.items() if section]
        if names and rng.random() < 0.8:
            name = rng.choice(names)
            section = mutate(bytes(encoded.sections[name]), rng)
            encoded = replace(encoded, sections={**encoded.sections, name: section})
        elif encoded.params and rng.random() < 0.8:
            key = rng.choice(list(encoded.params))
            params = {**encoded.params, key: mutate_json(encoded.params[key], rng)}
            encoded = replace(encoded, params=params)
        elif encoded.sections:
            without = rng.choice(list(encoded.sections))
            sections = {name: section for name, section in encoded.sections.items() if name != without}
            encoded = replace(encoded, sections=sections)
    return replace(entry, encoded=encoded)


def changed(checkpoint: Checkpoint, rng: random.Random) -> Checkpoint:
    """With one or two hostile entries."""
    entries = list(checkpoint.entries)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(entries))
        entries[at] = changed_entry(entries[at], rng)
    return replace(checkpoint, entries=tuple(entries))


def campaign(case: str, count: int, seed: int) -> int:
    """How many of the chains were refused; the others decode to what they were."""
    rng, refused = random.Random(seed), 0
    sound = [read_container(path.read_bytes()) for path in chain_of(case)]
    decode_chain(sound)  # compiles what it needs
    with limited_memory(MOST_MEMORY):
        for _ in range(count):
            chain = sound[: rng.randint(1, len(sound))]
            at = rng.randrange(len(chain))
            try:
                hostile = write_container(changed(chain[at], rng))
                chain = [*chain[:at], read_container(hostile), *chain[at + 1 :]]
                for length in (len(chain), at + 1):  # in the middle, not all of it is read
                    decode_chain(chain[:length], threads=rng.randint(1, 2))
            except (FormatError, ChainError):
                refused += 1
    return refused


@pytest.mark.parametrize("case", CASES)
def test_hostile_chains_are_decoded_or_refused(case: str) -> None:
    assert campaign(case, 40, seed=7) > 20


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_hostile_chains_are_decoded_or_refused_in_a_long_campaign(case: str) -> None:
    assert campaign(case, 2_500, seed=9) > 1_250
