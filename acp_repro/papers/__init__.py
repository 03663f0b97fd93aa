"""The papers that can be re-run, a folder each; ``acp_repro.pipeline.paper_registry`` finds them by name."""
