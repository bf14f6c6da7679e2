"""Generated code of the public API."""
