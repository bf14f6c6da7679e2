"""Which steps with prompts are one graph, and of how many tokens it is: a graph pads to its size.

Owns the rule; knows no graph.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from worker.model.config import ModelConfig
from worker.model.parameters import layer_weights

WHOLE_TOKENS = 1024
"""Steps of up to so many are one graph, unless there are more than DECODES beside their prompts."""
DECODES = 64
"""Beside the prompts of such a step at most: attention of fewer is padded to so many rows."""
MANY_TOKENS, MANY_DECODES = 2048, 256
"""The same of further graphs, for an engine that is busy: where the device would wait for the pieces."""
PRODUCTS_OF_A_LAUNCH = 4.5e10
"""Multiplications that an H200 does in the 0.15 ms in which the host launches a layer in pieces, attention
included. Of a layer that has more of them for a step's tokens the pieces are there in time, and pad less.
"""


class WholeSize(NamedTuple):
    """A graph that holds a whole step."""

    num_tokens: int
    is_split: bool  # whether keys are split: kernels.backend.StaticPrefill
    room: int = 0  # for decodes beside the prompts


class Grid(NamedTuple):
    """Numbers of tokens with a graph that has the same room for decodes beside the prompts; 0: has none."""

    room: int
    sizes: list[int]  # ascending

    @property
    def split_sizes(self) -> list[int]:
        """Of those whose keys are split: queries are few there, so the device has time for more padding."""
        return self.sizes[-1::-2][::-1]

    def size_of(self, num_tokens: int, *, is_split: bool) -> WholeSize:
        """The least that holds so many tokens, which are no more than the largest size."""
        size = least(self.split_sizes if is_split else self.sizes, num_tokens)
        assert size is not None, "the largest is among both"
        return WholeSize(size, is_split, self.room)


def grids_of(config: ModelConfig, sizes: Sequence[int], *, max_running: int) -> list[Grid]:
    """All, by their room: none beside, few, many. `sizes`: what may be padded to, ascending."""
    whole = [size for size in sizes if size <= WHOLE_TOKENS]
    if not whole:
        return []
    few, many = min(DECODES, sizes[0], max_running), min(MANY_DECODES, max_running)
    most_tokens = min(MANY_TOKENS, int(PRODUCTS_OF_A_LAUNCH / layer_weights(config)))
    of_many = [size for size in sizes[-1::-2][::-1] if many <= size <= most_tokens]
    if few == many:
        grids = [Grid(few, whole + [size for size in of_many if size > whole[-1]])]
    else:
        grids = [Grid(few, whole), Grid(many, of_many)]
    return [Grid(0, whole)] + [grid for grid in grids if grid.room and grid.sizes]


def least_grid(grids: Sequence[Grid], num_decode: int, num_tokens: int) -> Grid | None:
    """The one with the least room that holds such a step."""
    for grid in grids:
        if num_decode <= grid.room and num_tokens <= grid.sizes[-1] and bool(grid.room) == bool(num_decode):
            return grid
    return None


def whole_sizes_at(size: int, grids: Sequence[Grid]) -> Iterator[WholeSize]:
    """All graphs of so many tokens."""
    for grid in grids:
        if size in grid.sizes:
            yield WholeSize(size, False, grid.room)
        if size in grid.split_sizes:
            yield WholeSize(size, True, grid.room)


def least(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest that holds so many; sizes ascend."""
    return next((size for size in sizes if size >= num_tokens), None)
