"""Code shared by all packages: errors, atomic files, artifacts. It needs only the standard library."""
