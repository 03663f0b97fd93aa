"""Okabe and Ito's colours by role: one list for the figures and the explorer's page. No imports."""

# Of Figures 1 and 6 too. It stands out from the blues of the decay and from viridis, and has a contrast of 3
# or more with a white and a dark page, so a saved picture has one look.
BOUNDARY = "#D55E00"
ROLES = {
    "acp": "#0072B2",
    "exact": "#333333",
    "local": "#0072B2",
    "intermediate": "#8C8C8C",
    "global": "#E69F00",
    "boundary": BOUNDARY,
}
