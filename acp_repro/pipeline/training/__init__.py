"""Training: optimiser and schedule (Appendix B), checkpoints that survive, and the loop."""
