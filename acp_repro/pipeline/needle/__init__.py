"""The needle-in-a-haystack test: its prompts and scores, the test itself, and text to train for it."""
