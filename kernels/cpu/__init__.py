"""C++ for processors: sources, how they are built, and the shared library's functions."""
