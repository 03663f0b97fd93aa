"""The papers that can be re-run, a folder each; ``acp_repro.chain.registry`` finds them by name."""
