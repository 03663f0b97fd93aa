"""What every part stands on: errors for people, files that are whole or not there. Standard library only."""
