"""The integers of the worker, told apart by type. Knows nothing else."""

from typing import NewType

PageId = NewType("PageId", int)
"""Index of a page in the pool, 0 .. num_pages - 1; num_pages is the dummy page."""

Slot = NewType("Slot", int)
"""Raw place of one token in the pool: page * page_size + offset."""

Row = NewType("Row", int)
"""Index of a running sequence in the page table; max_running is the dummy row."""

SequenceId = NewType("SequenceId", int)
"""A sequence (one sample of a request); chosen by the service, unique per worker through its link."""

Owner = NewType("Owner", int)
"""Small number 1 .. 65535 given to a live sequence and used again after its end; 0: none."""

NO_PAGE = PageId(0xFFFFFFFF)
"""'No page' in page events and planes."""
