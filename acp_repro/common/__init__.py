"""Code that all packages share: errors for users, atomic files, artifacts. Needs only the standard library."""
