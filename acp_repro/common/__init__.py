"""Shared by every part: errors for users, files that are whole or not there. Standard library only."""
