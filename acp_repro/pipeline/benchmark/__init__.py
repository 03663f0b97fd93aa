"""Times this project's kernels and other attention kernels; each kernel is validated first."""
