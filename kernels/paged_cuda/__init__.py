"""The historical PagedAttention kernel in its own cache layout. "Block" is its document's word for a page."""
