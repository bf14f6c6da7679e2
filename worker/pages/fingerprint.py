"""Fingerprints: a label of a page's whole prefix, for readers, routers and comparisons.

Owns the key. The cache itself compares token ids; a collision here mislabels, it never serves wrong KV.

BLAKE2b, 8 bytes, keyed, over 8 bytes of the parent's fingerprint followed by the page's token ids as
u32; the parent of a first page is the keyed digest of its salt. All integers are little endian. It
costs about one microsecond a page and is computed in the engine when the page is sealed, because
snapshots and the list of evicted prefixes need it too.
"""

from hashlib import blake2b


class Fingerprinter:
    """Computes fingerprints under one key. 0 is never one: it means that a page is not sealed."""

    def __init__(self, key: bytes) -> None:
        if len(key) > 64:
            raise ValueError(f"the fingerprint key has {len(key)} bytes, at most 64 are possible")
        self._empty = blake2b(key=key, digest_size=8)
        self._salts: dict[bytes, bytes] = {}

    def of_salt(self, salt: bytes) -> bytes:
        """What stands for the parent of a first page."""
        found = self._salts.get(salt)
        if found is None:
            if len(self._salts) >= 4096:  # salts come from clients: bounded
                self._salts.clear()
            hasher = self._empty.copy()
            hasher.update(salt)
            found = self._salts[salt] = hasher.digest()
        return found

    def of_page(self, parent: bytes, token_bytes: bytes) -> int:
        """Fingerprint of a page after ``parent`` (8 bytes: of_salt, or a fingerprint little endian)."""
        hasher = self._empty.copy()
        hasher.update(parent + token_bytes)
        return int.from_bytes(hasher.digest(), "little") or 1
