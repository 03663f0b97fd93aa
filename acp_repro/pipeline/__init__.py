"""The pipeline that reproduces the papers, from suite files to figures. The library never imports it."""
