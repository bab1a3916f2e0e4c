"""The study that judges the whole recipe: against a sweep, on problems that were held out."""
