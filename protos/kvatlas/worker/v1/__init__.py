"""Generated code of the private seam."""
