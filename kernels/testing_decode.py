"""Random decode steps as a layer sees them, for tests of decode attention on any device."""

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.decode_plan import DecodeLaunch, DecodePlan, make_plan, plan_decode
from kernels.paged_decode import paged_decode, paged_decode_product
from kernels.rotary_store import Rotary, rotary_store


class DecodeProblem:
    """A qkv product over rows whose pages lie in random order; new tokens' slots and all unused are NaN."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        page: int,
        kv_lens: list[int],
        *,
        with_norm: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """shape: heads, KV heads, head_dim. Results depend on the arguments alone, but for `device`."""
        heads, kv_heads, dim = shape
        draw = torch.Generator().manual_seed(heads * 1000 + dim + seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        self.shape = shape
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.rows = torch.randperm(len(kv_lens), generator=draw).int()
        pages = torch.randperm(sum(-(-n // page) for n in kv_lens) + 3, generator=draw).tolist()
        pool = torch.full((2, len(pages) * page, kv_heads, dim), float("nan"))
        width = -(-max(kv_lens) // page) * page
        self.page_table = torch.zeros(len(kv_lens) + 1, width, dtype=torch.int32)
        for row, length in zip(self.rows.tolist(), kv_lens, strict=True):
            for index in range(-(-length // page)):
                first = pages.pop() * page
                self.page_table[row, index * page : (index + 1) * page] = torch.arange(first, first + page)
            pool[:, self.page_table[row, : length - 1].long()] = normal(2, length - 1, kv_heads, dim)
        self.slots = self.page_table[self.rows.long(), self.kv_lens.long() - 1]
        self.qkv = normal(len(kv_lens), (heads + 2 * kv_heads) * dim).to(dtype)
        self.kv = KvLayer(pool[0].to(dtype), pool[1].to(dtype))
        q_norm, k_norm = (normal(dim).to(dtype) if with_norm else None for _ in range(2))
        self.rotary = Rotary(normal(width, dim), q_norm, k_norm, 1e-5)
        self._move(torch.device(device))

    def _move(self, device: torch.device) -> None:
        for name in ("kv_lens", "rows", "page_table", "slots", "qkv"):
            setattr(self, name, getattr(self, name).to(device))
        self.kv = KvLayer(self.kv.k.to(device), self.kv.v.to(device))
        rotary = self.rotary
        q_norm, k_norm = (
            gain if gain is None else gain.to(device) for gain in (rotary.q_norm, rotary.k_norm)
        )
        self.rotary = Rotary(rotary.cos_sin.to(device), q_norm, k_norm, rotary.eps)

    def plan(self, launch: DecodeLaunch | None = None, chunk_scale: int | None = None) -> DecodePlan:
        """Of its lengths, listed."""
        sizes = (len(self.rows), *self.shape, self.page_table.shape[1], self.qkv.device)
        plan = make_plan(*sizes, chunk_scale=chunk_scale, launch=launch)
        plan_decode(plan, self.rows, self.kv_lens)
        return plan

    def by_two_kernels(self, kv: KvLayer, plan: DecodePlan) -> Tensor:
        """Attention behind a kernel that stores the new tokens in `kv`."""
        heads, _, dim = self.shape
        q = torch.empty(len(self.rows), heads, dim, dtype=self.qkv.dtype, device=self.qkv.device)
        rotary_store(self.qkv, kv, self.slots, self.kv_lens - 1, self.rotary, q)
        return paged_decode(q, kv, self.page_table, plan, scale=dim**-0.5)

    def by_one(self, kv: KvLayer, plan: DecodePlan) -> Tensor:
        """The same of one launch."""
        scale = self.shape[2] ** -0.5
        return paged_decode_product(self.qkv, kv, self.page_table, plan, self.rotary, scale=scale)


def copied(kv: KvLayer) -> KvLayer:
    """A pool of its own with the same content."""
    return KvLayer(kv.k.clone(), kv.v.clone(), kv.k_scale, kv.v_scale)


def bits(kv: KvLayer) -> Tensor:
    """K and V as bytes, so that NaN equals NaN."""
    return torch.stack([kv.k, kv.v]).view(torch.uint8)
