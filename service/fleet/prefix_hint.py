"""What of a prompt tells where it belongs and how much of it a cache has: hints, for routers and Tokenize.

Owns nothing. Equal fingerprints may in theory lie; the cache itself compares token ids.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

ROUTED_PAGES = 4  # the first pages of a prompt decide; the longer ones of a prefix go to the same worker


def routing_key(token_ids: Sequence[int], page_size: int, salt: bytes) -> bytes:
    """What prompts with the same first whole pages have in common, at most ROUTED_PAGES of them.

    Empty for a prompt without a whole page that a cache could have: its last token is always computed. Two
    salts never share pages, so each has keys of its own. Takes no deployment's key: it never leaves here.
    """
    pages = min((len(token_ids) - 1) // page_size, ROUTED_PAGES)
    if pages <= 0:
        return b""
    plane = np.asarray(token_ids[: pages * page_size], dtype="<u4").tobytes()
    return blake2b(plane, key=blake2b(salt, digest_size=32).digest(), digest_size=16).digest()


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
