"""Suite file -> runs -> records -> figures: what re-runs the papers. The library never imports it."""
