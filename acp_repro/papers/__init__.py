"""The papers that can be re-run, a folder each; ``acp_repro.pipeline.registry`` finds them by name."""
