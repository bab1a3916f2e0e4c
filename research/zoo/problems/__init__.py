"""The problems, one file a family."""
