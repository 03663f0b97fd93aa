"""Times our kernels and other attention kernels; each is checked first."""
