"""Training: optimiser and schedule (Appendix B), checkpoints, and the training loop."""
