"""Sinks that show a run to people: one file per library, imported only when used."""
