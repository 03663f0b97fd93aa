"""The Okabe-Ito colours by role, shared by the figures and the explorer. This module has no imports."""

# Figures 1 and 6 use the same colour. It differs from the blues of the decay and from viridis, and has a
# contrast of at least 3 with a white and a dark page, so saved images look the same in both themes.
BOUNDARY = "#D55E00"
ROLES = {
    "acp": "#0072B2",
    "exact": "#333333",
    "local": "#0072B2",
    "intermediate": "#8C8C8C",
    "global": "#E69F00",
    "boundary": BOUNDARY,
}
