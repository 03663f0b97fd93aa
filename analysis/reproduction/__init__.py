"""REPRODUCTION.md: every claim of every paper in a line, judged on the published records."""
