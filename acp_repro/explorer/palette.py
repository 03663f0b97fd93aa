"""Okabe and Ito's colours by role: one list for the figures and the explorer's page. No imports."""

# The boundary has a contrast of 3 or more with a white and a dark page, so a saved picture has one look.
ROLES = {
    "acp": "#0072B2",
    "exact": "#333333",
    "local": "#0072B2",
    "intermediate": "#8C8C8C",
    "global": "#E69F00",
    "boundary": "#D55E00",
}
