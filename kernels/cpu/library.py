"""The functions of the shared library, on tensors.

Owns the binding: pointers, strides, threads. Tensors are fp32 on the CPU; what a function needs of them is
in its docstring, and its callers have checked it.
"""

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.cpu.build import build
from kernels.cpu.memory import Arena

log = logging.getLogger(__name__)

_Argument = type[c_int] | type[c_int64] | type[c_float] | type[c_void_p]
_SIGNATURES: dict[str, tuple[_Argument | None, list[_Argument]]] = {
    "kv_set_threads": (None, [c_int]),
    "kv_num_threads": (c_int, []),
    "kv_multiplies_integers": (c_int, []),
    "kv_set_digits": (None, [c_int]),
    "kv_packed_bytes": (c_int64, [c_int, c_int64, c_int64]),
    "kv_pack_rows": (c_int, [c_int, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p]),
    "kv_product": (
        c_int,
        [c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64],
    ),
    "kv_store": (
        c_int,
        [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64],
    ),
    "kv_attention": (
        c_int,
        [
            *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_int, c_int, c_int, c_int, c_float),
        ],
    ),
    "kv_rms_norm": (
        None,
        [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float],
    ),
    "kv_add_rms_norm": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float]),
    "kv_rotary": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "kv_silu_mul": (None, [c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "kv_decode": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "kv_embed_q8": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64]),
    "kv_draw": (None, [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 10]),
    "kv_penalise": (None, [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 6]),
    "kv_mask": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64]),
    "kv_best": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
}


Precision = Literal["exact", "fast"]
"""exact: as exact as fp32. fast: activations rounded at 2**-16 of the largest of their 32 features, a hundred
times finer than bf16, where products run in whole numbers; elsewhere the same as exact."""


class Format(IntEnum):
    """How a packed matrix keeps its weights; numbers are those of rows.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    Q4_1 = 4


class DrawColumns(NamedTuple):
    """How each row is drawn; contiguous, in the order of kv_draw."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # 0: off
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed_low: npt.NDArray[np.int64]
    seed_high: npt.NDArray[np.int64]
    choice: npt.NDArray[np.int64]
    position: npt.NDArray[np.int32]


class PenaltyColumns(NamedTuple):
    """Penalties of each row, in the order of kv_penalise."""

    repetition: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]


class HistoryTables(NamedTuple):
    """Tokens of rows with penalties; lines[i] is the line of row i."""

    counts: Tensor  # int32 [num_lines, vocab_size]
    in_prompt: Tensor  # bool [num_lines, vocab_size]
    lines: Tensor  # int64 [n]


class CpuLibrary:
    """A loaded library. One call at a time uses the threads; others wait."""

    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            call = getattr(self._calls, name)
            call.restype = result
            call.argtypes = arguments
        self._arena = Arena()
        self._num_threads = 1

    def use_torch_threads(self) -> None:
        """Works on as many threads as torch does. Cheap when that has not changed."""
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            self._calls.kv_set_threads(num_threads)
            self._num_threads = num_threads

    @property
    def num_threads(self) -> int:
        """Threads that work on a call, the caller's included."""
        return int(self._calls.kv_num_threads())

    @property
    def multiplies_integers(self) -> bool:
        """Whether quantised products run in whole numbers (AVX-512 VNNI)."""
        return bool(self._calls.kv_multiplies_integers())

    def use_precision(self, precision: Precision) -> None:
        """How activations enter quantised products, for the whole process."""
        self._calls.kv_set_digits({"exact": 3, "fast": 2}[precision])

    def pack(self, form: Format, rows: npt.NDArray[np.uint8], num_features: int) -> npt.NDArray[np.uint8]:
        """A matrix in the order its product reads; rows are stored bytes, [num_outputs, bytes per row]."""
        num_outputs, row_bytes = rows.shape
        size = self._calls.kv_packed_bytes(form, num_outputs, num_features)
        assert size >= 0, f"{form.name} cannot hold rows of {num_features} features"
        packed = self._arena.zeros(size)
        rows = np.ascontiguousarray(rows)
        code = self._calls.kv_pack_rows(
            form, rows.ctypes.data, row_bytes, num_outputs, num_features, 0, packed.ctypes.data
        )
        assert code == 0, f"packing {form.name} failed with {code}"
        return packed

    def product(
        self, form: Format, packed: npt.NDArray[np.uint8], bias: Tensor | None, x: Tensor, y: Tensor
    ) -> None:
        """y = x W^T + bias. x [m, features] and y [m, outputs] with contiguous rows."""
        code = self._calls.kv_product(
            form,
            packed.ctypes.data,
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            x.shape[0],
            y.shape[1],
            x.shape[1],
        )
        assert code == 0, f"product in {form.name} failed with {code}"

    def store(self, k: Tensor, v: Tensor, kv: KvLayer, write_slots: Tensor) -> None:
        """Copies rows to slots. k, v [n, kv_heads, head_dim], contiguous per token; write_slots int32."""
        num_slots, num_heads, head_dim = kv.k.shape
        code = self._calls.kv_store(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            num_heads * head_dim,
            num_slots,
            write_slots.data_ptr(),
            k.shape[0],
        )
        assert code == 0, f"a slot of {write_slots.tolist()} lies outside the pool of {num_slots} slots"

    def attention(self, q: Tensor, kv: KvLayer, batch: PagedBatch, scale: float) -> Tensor:
        """Attention of a step's spans. q [n, heads, head_dim], contiguous per token; result contiguous."""
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(num_tokens, num_heads, head_dim)
        code = self._calls.kv_attention(
            q.data_ptr(),
            q.stride(0),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            out.data_ptr(),
            num_heads * head_dim,
            batch.page_table.data_ptr(),
            batch.page_table.stride(0),
            batch.rows.data_ptr(),
            batch.kv_lens.data_ptr(),
            batch.q_indptr.data_ptr(),
            batch.positions.data_ptr(),
            batch.rows.shape[0],
            num_heads,
            kv.k.shape[1],
            head_dim,
            scale,
        )
        assert code == 0, f"attention of {num_heads} heads of {head_dim} over {kv.k.shape[1]} KV heads"
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis of x [n, width] or [n, heads, width], rows contiguous; result contiguous."""
        out = torch.empty(x.shape)
        num_inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        self._calls.kv_rms_norm(
            x.data_ptr(),
            x.stride(0),
            inner_stride,
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            num_inner,
            x.shape[-1],
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to residual in place and norms the sum. Both [n, width], contiguous."""
        out = torch.empty(x.shape)
        self._calls.kv_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
        )
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turns x [n, heads, head_dim], contiguous per token; cos, sin [n, head_dim / 2] contiguous."""
        num_tokens, num_heads, head_dim = x.shape
        out = torch.empty(num_tokens, num_heads, head_dim)
        self._calls.kv_rotary(
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_heads,
            head_dim // 2,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [n, 2 * width], rows contiguous; result [n, width]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, width)
        self._calls.kv_silu_mul(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, width)
        return out

    def decode(
        self, decoder: ctypes.Structure, step: ctypes.Structure, residual: Tensor, normed: Tensor
    ) -> int:
        """All layers; the structures are those of kernels.cpu.decoder. Not 0: an index is out of range."""
        code: int = self._calls.kv_decode(
            ctypes.byref(decoder), ctypes.byref(step), residual.data_ptr(), normed.data_ptr()
        )
        return code

    def embed_q8(self, table: npt.NDArray[np.uint8], width: int, ids: Tensor) -> Tensor:
        """Rows of a Q8_0 matrix [rows, bytes per row]; ids int32 [n]."""
        out = torch.empty(ids.shape[0], width)
        code = self._calls.kv_embed_q8(
            table.ctypes.data, table.shape[0], width, ids.data_ptr(), out.data_ptr(), ids.shape[0]
        )
        assert code == 0, f"a token id of {ids.tolist()} is outside the vocabulary of {table.shape[0]}"
        return out

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Highest of each row of x [n, width], NaN where a row holds NaN, and its lowest index."""
        values, indexes = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
        self._calls.kv_best(
            x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], values.data_ptr(), indexes.data_ptr()
        )
        return values, indexes

    def draw(self, logits: Tensor, best: Tensor, columns: DrawColumns, ids: Tensor) -> None:
        """One token per row, as kernels/noise.py defines it; rows whose best is not finite keep their id.

        logits [n, vocab_size], rows contiguous; best [n]; ids int64 [n], written.
        """
        self._calls.kv_draw(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[0],
            logits.shape[1],
            best.data_ptr(),
            *(column.ctypes.data for column in columns),
            ids.data_ptr(),
        )

    def penalise(self, logits: Tensor, history: HistoryTables, columns: PenaltyColumns) -> None:
        """Penalties on logits [n, vocab_size] in place."""
        assert history.counts.shape[1] == logits.shape[1], "the tables are of another vocabulary"
        self._calls.kv_penalise(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[0],
            logits.shape[1],
            history.counts.data_ptr(),
            history.in_prompt.data_ptr(),
            history.lines.data_ptr(),
            *(column.ctypes.data for column in columns),
        )

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """-inf in place where a mask has no bit; bit t of words[i] is logits[rows[i], t].

        rows int64 [m]; words int32 [m, at least vocab_size / 32], contiguous.
        """
        assert words.is_contiguous()
        assert words.shape[1] * 32 >= logits.shape[1], "the masks are of another vocabulary"
        self._calls.kv_mask(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            len(rows),
            rows.data_ptr(),
            words.data_ptr(),
            words.shape[1],
        )


@cache
def cpu_library(cache_folder: Path | None = None) -> CpuLibrary | None:
    """The library of this process; None where there is no compiler, or its result does not load."""
    path = build(cache_folder)
    if path is None:
        return None
    try:
        library = CpuLibrary(path)
    except (OSError, AttributeError) as error:
        log.warning("event=cpu_kernels_not_loaded path=%s why=%r", path, str(error))
        return None
    library.use_torch_threads()
    log.info(
        "event=cpu_kernels_loaded path=%s threads=%d integer_products=%s",
        path,
        torch.get_num_threads(),
        library.multiplies_integers,
    )
    return library
