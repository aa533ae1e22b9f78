"""The .gnu.hash table: how the dynamic linker looks a name up, and how a name is made unfindable.

Layout (DT_GNU_HASH): nbuckets, symoffset, bloom words, bloom shift; the bloom filter; for each bucket the
number of its first symbol (0: none); for each symbol from symoffset on its hash, whose low bit says instead
that it is the last of its bucket. A lookup compares all bits but that one, then the names.
"""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from m8d_build.elf.image import Image

__all__ = ["GnuHash", "gnu_hash", "unfindable_hash"]

MASK = 0xFFFFFFFF
SEED, FACTOR = 5381, 33  # the hash is Bernstein's, modulo 2**32
TRIES = 64
_POWERS: list[int] = [1]


def gnu_hash(name: bytes) -> int:
    """Return the GNU hash of a symbol name, 32 bits.

    The sum is that of ``h = h * 33 + byte`` written out, which the interpreter adds up several times faster;
    half a second is saved on a library of fifty thousand C++ names.
    """
    size = len(name)
    while len(_POWERS) <= size:
        _POWERS.append(_POWERS[-1] * FACTOR & MASK)
    total = SEED * _POWERS[size]
    if size:
        total += sum(map(mul, name, _POWERS[size - 1 :: -1]))
    return total & MASK


def unfindable_hash(stored: int, own: int, buckets: int) -> int:
    """Return what to store instead of a symbol's hash so that no lookup finds the symbol.

    The end-of-chain bit stays as it is. The new value belongs to another bucket, so nothing that walks this
    chain can even match it; with one or two buckets there is none, and one that only differs from the
    symbol's own hash is enough, because a lookup compares names last. It depends on name and table alone: the
    same again, never back.

    Args:
        stored: the table's present word.
        own: the hash of the symbol's name.
        buckets: number of buckets, from 1 up.
    """
    bucket = own % buckets
    fallback = MASK - 1 if own | 1 != MASK else MASK - 3
    for value in range(MASK - 1, MASK - 1 - 2 * TRIES, -2):
        if value % buckets != bucket and (value | 1) % buckets != bucket:
            fallback = value
            break
    return fallback | (stored & 1)


class GnuHash:
    """One library's .gnu.hash.

    Args:
        image: the library.
        offset: of the table in the file.

    Attributes:
        symoffset: number of the first symbol that can be looked up.
        buckets: first symbol of each bucket.
        chain: one word per symbol from ``symoffset`` on.
        chain_offset: where ``chain`` begins in the file.

    Raises:
        ElfInvalid: the table is damaged.
    """

    def __init__(self, image: Image, offset: int) -> None:
        self.symoffset: int
        self.shift: int
        count, self.symoffset, bloom_words, self.shift = image.unpack("<IIII", offset)
        if not count or not bloom_words or bloom_words & (bloom_words - 1):
            raise image.invalid(
                f"has a .gnu.hash with {count} buckets and {bloom_words} bloom words",
                "there must be at least one bucket, and a power of two of words",
            )
        self.bloom: array[int] = image.words("Q", offset + 16, bloom_words)
        buckets_offset = offset + 16 + 8 * bloom_words
        self.buckets: array[int] = image.words("I", buckets_offset, count)
        self.chain_offset = buckets_offset + 4 * count
        self.chain: array[int] = image.words("I", self.chain_offset, self._length(image))

    @property
    def symbols(self) -> int:
        """Number of symbols of the library's .dynsym, those that cannot be looked up included."""
        return self.symoffset + len(self.chain)

    def lookup(self, name: str, names: Sequence[str]) -> Iterator[int]:
        """Yield the numbers of the symbols the dynamic linker would find under a name.

        Args:
            name: what is looked for.
            names: the name of each symbol of .dynsym.
        """
        wanted = gnu_hash(name.encode("utf-8", "surrogateescape"))
        word = self.bloom[(wanted // 64) & (len(self.bloom) - 1)]
        if not (word >> (wanted % 64)) & (word >> ((wanted >> self.shift) % 64)) & 1:
            return
        index = self.buckets[wanted % len(self.buckets)]
        while index >= self.symoffset and index < self.symbols:
            stored = self.chain[index - self.symoffset]
            if (stored ^ wanted) >> 1 == 0 and names[index] == name:
                yield index
            if stored & 1:
                return
            index += 1

    def _length(self, image: Image) -> int:
        last = max(self.buckets)
        if last == 0:
            return 0
        if last < self.symoffset:
            raise image.invalid("has a .gnu.hash bucket before its first symbol", "the table is damaged")
        index = int(last) - self.symoffset
        while not image.unpack("<I", self.chain_offset + 4 * index)[0] & 1:
            index += 1
        return index + 1
