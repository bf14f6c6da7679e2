"""How much of a prompt a worker's prefix cache has, by fingerprint: a hint, for Tokenize and for routers.

Owns nothing. Equal fingerprints may in theory lie; the cache itself compares token ids.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt


def page_fingerprints(
    token_ids: Sequence[int], page_size: int, key: bytes, salt: bytes
) -> npt.NDArray[np.uint64]:
    """Fingerprints of the whole pages that a prompt may find: its last token is always computed.

    BLAKE2b of 8 bytes, keyed, over the parent's fingerprint (first page: the digest of the salt) and the
    page's ids as u32; about a microsecond a page.
    """
    empty = blake2b(key=key, digest_size=8)
    plane = np.asarray(token_ids, dtype="<u4").tobytes()
    hasher = empty.copy()
    hasher.update(salt)
    parent, found = hasher.digest(), []
    for page in range((len(token_ids) - 1) // page_size):
        hasher = empty.copy()
        hasher.update(parent + plane[4 * page * page_size : 4 * (page + 1) * page_size])
        number = int.from_bytes(hasher.digest(), "little") or 1
        parent = number.to_bytes(8, "little")
        found.append(number)
    return np.array(found, dtype=np.uint64)


def cached_tokens(prompt: npt.NDArray[np.uint64], pool: npt.NDArray[np.uint64], page_size: int) -> int:
    """Leading tokens of a prompt (`page_fingerprints`) that are in a pool (one fingerprint per page)."""
    is_there = np.isin(prompt, pool)
    missing = np.flatnonzero(~is_there)
    return int(missing[0] if len(missing) else len(prompt)) * page_size
