"""What every part stands on: errors for people, and files that are whole or not there. Standard library only."""
